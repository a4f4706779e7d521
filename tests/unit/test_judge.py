"""Judging whom a stalled job waits for, from records and answers."""

import random
import time

import pytest

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import Verdict, find_suspects, judge
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.local.facts import Frame, ProcessFacts

NOW = 1_000_000.0


def record(
    rank: int,
    *,
    awaits: tuple[int, ...] | None = None,
    members: tuple[int, ...] | None = None,
    phase: str = "new_group 1",
    protocol: str = "gloo",
    group: str = "1",
    key: str = "",
) -> BlockedRecord:
    """Return the record of a rank that has been blocked for 40 s."""
    return BlockedRecord(
        rank=rank,
        host=f"node{rank}",
        pid=100 + rank,
        operation="get",
        keys=(key or f"{group}/key",),
        phase=phase,
        protocol=protocol,
        group=group,
        awaits=awaits,
        members=members,
        started=NOW - 40,
    )


def info(rank: int) -> RankInfo:
    """Return the registration of a rank."""
    return RankInfo(
        rank=rank, host=f"node{rank}", pid=100 + rank, world_size=4, started=NOW - 100
    )


def verdict_on(
    *records: BlockedRecord,
    world_size: int = 4,
    answers: tuple[ProcessFacts, ...] = (),
    registered: tuple[int, ...] = (0, 1, 2, 3),
) -> Verdict:
    """Judge these records."""
    blocked = {one.rank: one for one in records}
    return judge(
        blocked,
        find_suspects(blocked, world_size),
        world_size,
        {answer.rank or 0: answer for answer in answers},
        {rank: info(rank) for rank in registered},
        lambda rank: f"roster{rank}",
        NOW,
    )


def running(rank: int) -> ProcessFacts:
    """Return the answer of a rank that is busy elsewhere."""
    return ProcessFacts(
        rank=rank,
        host=f"node{rank}",
        pid=100 + rank,
        state="running",
        idle_seconds=612.0,
        frames=(Frame(file="data.py", line=88, function="load_dataset"),),
        source="itself",
    )


class TestWriters:
    """Keys whose writers are known."""

    def test_busy_writer_is_named_with_what_it_executes(self) -> None:
        """The text has host, pid, time since its last call, and its frame."""
        verdict = verdict_on(
            *(record(rank, awaits=(2,)) for rank in (0, 1, 3)), answers=(running(2),)
        )
        assert verdict.awaited_ranks == (2,)
        assert verdict.cause == "busy"
        assert verdict.describe_awaited() == (
            "rank 2 on node2 (pid 102): alive, no store call for 612 s,"
            " in data.py:88 load_dataset"
        )
        assert verdict.waiting_ranks == (0, 1, 3)
        assert verdict.waited_seconds == pytest.approx(40)

    def test_unregistered_writer_has_not_started(self) -> None:
        """Its host is the one of the launcher's roster."""
        verdict = verdict_on(
            *(record(rank, awaits=(2,)) for rank in (0, 1, 3)), registered=(0, 1, 3)
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("not_started", (2,))
        assert verdict.awaited[0].host == "roster2"

    @pytest.mark.parametrize(
        ("state", "cause"), [("gone", "gone"), ("stopped", "stopped")]
    )
    def test_state_of_the_process_is_the_cause(self, state: str, cause: str) -> None:
        """An ended or stopped process is not busy."""
        answer = ProcessFacts(rank=2, host="node2", pid=102, state=state)  # type: ignore[arg-type]  # parametrized
        verdict = verdict_on(record(0, awaits=(2,)), answers=(answer,))
        assert (verdict.cause, verdict.awaited_ranks) == (cause, (2,))

    def test_silent_writer_is_named_without_a_cause(self) -> None:
        """Its key does not exist; why is unknown."""
        verdict = verdict_on(record(0, awaits=(2,)))
        assert (verdict.cause, verdict.awaited_ranks) == ("unknown", (2,))

    def test_blocked_writer_is_not_blamed(self) -> None:
        """Rank 0 waits for rank 3 itself; rank 3 is awaited."""
        verdict = verdict_on(
            record(1, awaits=(0,)),
            record(2, awaits=(0,)),
            record(0, awaits=(3,), phase="connecting to the store"),
            registered=(0, 1, 2),
        )
        assert verdict.awaited_ranks == (3,)


class TestElimination:
    """Keys whose writer is unknown."""

    def test_only_rank_that_is_not_blocked_is_named(self) -> None:
        """All others wait."""
        waits = [
            record(rank, phase="key go", protocol="", group="") for rank in (0, 1, 3)
        ]
        verdict = verdict_on(*waits, answers=(running(2),))
        assert (verdict.cause, verdict.awaited_ranks) == ("busy", (2,))

    def test_several_busy_ranks_are_not_named(self) -> None:
        """Any of them may be the writer."""
        waits = [record(rank, phase="key go", protocol="", group="") for rank in (0, 1)]
        verdict = verdict_on(*waits, answers=(running(2), running(3)))
        assert verdict.awaited_ranks == ()
        assert verdict.cause == "unknown"
        assert "2-3" in verdict.describe_awaited()

    def test_process_that_cannot_arrive_is_named(self) -> None:
        """A rank that has ended cannot write the key, a busy one can."""
        waits = [record(rank, phase="key go", protocol="", group="") for rank in (0, 1)]
        gone = ProcessFacts(rank=3, host="node3", pid=103, state="gone")
        verdict = verdict_on(*waits, answers=(running(2), gone))
        assert (verdict.cause, verdict.awaited_ranks) == ("gone", (3,))

    @pytest.mark.parametrize(
        ("state", "detail"),
        [
            ("gone", "exited with code 0"),
            ("stopped", "did not answer within 2 s: it holds the GIL, or gets no CPU"),
        ],
    )
    def test_process_that_finished_or_is_slow_is_not_named(
        self, state: str, detail: str
    ) -> None:
        """The busy rank may be the writer; the text has what is known of both."""
        waits = [record(rank, phase="key go", protocol="", group="") for rank in (0, 1)]
        answer = ProcessFacts(rank=3, host="node3", state=state, detail=detail)  # type: ignore[arg-type]  # parametrized
        verdict = verdict_on(*waits, answers=(running(2), answer))
        assert (verdict.cause, verdict.awaited_ranks) == ("unknown", ())
        assert detail in verdict.describe()

    def test_ranks_outside_the_group_are_not_candidates(self) -> None:
        """The barrier of ranks 0 and 1 does not wait for rank 2."""
        verdict = verdict_on(
            record(0, members=(0, 1), protocol="store_barrier"), answers=(running(1),)
        )
        assert verdict.awaited_ranks == (1,)


class TestCycles:
    """Stalls in which all ranks are blocked."""

    def test_different_groups_of_one_protocol_have_diverged(self) -> None:
        """The rank that the majority does not follow is named, with both keys."""
        verdict = verdict_on(
            *(record(rank, awaits=(3,), group="A", key="A/3") for rank in (0, 1, 2)),
            record(3, awaits=(0,), group="B", key="B/0"),
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("diverged", (3,))
        text = verdict.describe()
        assert "A/3" in text
        assert "B/0" in text

    def test_users_keys_in_a_circle(self) -> None:
        """Each of two ranks waits for a key that the other one writes."""
        verdict = verdict_on(
            record(0, phase="key b", protocol="", group="", key="b"),
            record(1, phase="key a", protocol="", group="", key="a"),
            world_size=2,
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("circular", (0, 1))

    def test_unknown_writers_among_many_blocked_ranks(self) -> None:
        """No rank can be named."""
        verdict = verdict_on(
            *(record(rank, phase="key go", protocol="", group="") for rank in range(4))
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("unknown", ())


def test_random_victims_are_named_and_no_other() -> None:
    """Whatever the size and the victims, exactly the victims are named."""
    generator = random.Random(7)
    for _ in range(200):
        world_size = generator.randint(2, 64)
        victims = tuple(
            sorted(
                generator.sample(
                    range(world_size), generator.randint(1, world_size - 1)
                )
            )
        )
        waiting = [
            record(rank, awaits=victims)
            for rank in range(world_size)
            if rank not in victims
        ]
        verdict = verdict_on(*waiting, world_size=world_size)
        assert verdict.awaited_ranks == victims


def test_large_job_is_judged_quickly() -> None:
    """16,384 ranks, of which 100 never connected."""
    victims = tuple(range(5000, 5100))
    waiting = [
        record(rank, awaits=victims) for rank in range(16_384) if rank not in victims
    ]
    started = time.process_time()
    verdict = verdict_on(*waiting, world_size=16_384, registered=())
    assert verdict.awaited_ranks == victims
    assert len(verdict.awaited) == 64
    assert time.process_time() - started < 10
