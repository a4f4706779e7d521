"""Judging whom a stalled job waits for, from records and answers."""

import random
import time
from dataclasses import replace

import pytest

from tracedstore.common.causes import REMEDIES
from tracedstore.common.procfs import IN_KERNEL
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import (
    Verdict,
    find_suspects,
    judge,
    still_waits,
)
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


def waits_for_go(*ranks: int) -> list[BlockedRecord]:
    """Return the waits of ranks for a key whose writer is unknown."""
    return [record(rank, phase="key go", protocol="", group="") for rank in ranks]


class TestWriters:
    """Keys whose writers are known."""

    def test_busy_writer_is_named_with_what_it_executes(self) -> None:
        """The text has host, pid, time since its last call, and its frame."""
        verdict = verdict_on(
            *(record(rank, awaits=(2,)) for rank in (0, 1, 3)), answers=(running(2),)
        )
        assert verdict.awaited_ranks == (2,)
        assert verdict.cause == "busy"
        assert verdict.describe_awaited(NOW) == (
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
        """A stopped rank has work left; the busy one, which may too, is listed."""
        stopped = ProcessFacts(rank=3, host="node3", pid=103, state="stopped")
        verdict = verdict_on(*waits_for_go(0, 1), answers=(running(2), stopped))
        assert (verdict.cause, verdict.awaited_ranks) == ("stopped", (3,))
        assert any("rank 2 on node2" in text for text in verdict.evidence)

    @pytest.mark.parametrize(
        ("state", "detail"),
        [
            ("gone", ""),
            ("gone", "exited with code 0"),
            ("gone", "exited with code 1"),
            ("gone", "killed by SIGKILL"),
            ("unresponsive", "did not answer within 2 s (state R)"),
        ],
    )
    def test_process_that_finished_or_is_slow_is_not_named(
        self, state: str, detail: str
    ) -> None:
        """The busy rank may be the writer; the text has what is known of both."""
        answer = ProcessFacts(rank=3, host="node3", state=state, detail=detail)  # type: ignore[arg-type]  # parametrized
        verdict = verdict_on(*waits_for_go(0, 1), answers=(running(2), answer))
        assert (verdict.cause, verdict.awaited_ranks) == ("unknown", ())
        assert detail in verdict.describe()
        assert "rank 2 on node2" in verdict.describe()
        assert "ranks 2-3" in verdict.describe_awaited()

    def test_ended_ranks_are_named_if_no_other_candidate_is_left(self) -> None:
        """Neither writes the key any more, and one of them has failed."""
        failed = ProcessFacts(
            rank=3, state="gone", host="n", detail="killed by SIGKILL"
        )
        done = ProcessFacts(rank=2, state="gone", host="n", detail="exited with code 0")
        verdict = verdict_on(*waits_for_go(0, 1), answers=(done, failed))
        assert (verdict.cause, verdict.awaited_ranks) == ("gone", (3,))
        assert "exited with code 0" in verdict.describe()

    def test_ranks_outside_the_group_are_not_candidates(self) -> None:
        """The barrier of ranks 0 and 1 does not wait for rank 2."""
        verdict = verdict_on(
            record(0, members=(0, 1), protocol="store_barrier"), answers=(running(1),)
        )
        assert verdict.awaited_ranks == (1,)


class TestSilentHost:
    """Ranks of a host of which no process answers, and whose agent is silent."""

    def test_all_its_ranks_are_said_once(self) -> None:
        """Also one whose record says that it waits itself: it does not any more."""
        blocked = {
            0: record(0, awaits=(2, 3)),
            1: record(1, awaits=(2, 3)),
            3: record(3, awaits=(0,), group="2"),
        }
        silent = {rank: on_nodeb(rank, "silent") for rank in (2, 3)}
        still = {
            rank: one
            for rank, one in blocked.items()
            if still_waits(one, silent.get(rank), NOW)
        }
        verdict = judge(
            still,
            find_suspects(still, 4),
            4,
            silent,
            {rank: info(rank) for rank in range(4)},
            lambda _rank: "",
            NOW,
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("host_silent", (2, 3))
        assert verdict.describe_awaited(NOW + 5) == (
            "ranks 2-3 on nodeb: no process of nodeb answers, its agent has been silent"
            " for 15 s: the host is down, frozen or cut off"
        )
        assert verdict.remedy == REMEDIES["host_silent"]

    def test_host_of_which_a_process_answers(self) -> None:
        """Only its agent is silent, and a rank does not answer."""
        verdict = verdict_on(
            record(0, awaits=(2, 3)),
            answers=(on_nodeb(2, "silent"), on_nodeb(3, "running")),
        )
        assert [one.cause for one in verdict.awaited] == ["unknown", "busy"]
        assert "the host is down" not in verdict.describe()


def on_nodeb(rank: int, state: str) -> ProcessFacts:
    """Return what is known about a rank of a host with two ranks."""
    return ProcessFacts(
        rank=rank,
        host="nodeb",
        pid=100 + rank,
        state=state,  # type: ignore[arg-type]  # one of them
        idle_seconds=10.0,
    )


class TestSeveralCauses:
    """Cause, evidence and remedy are of each awaited rank."""

    def test_four_living_ranks_and_one_that_has_ended(self) -> None:
        """The head is the rank that has ended, and the others are not said to have."""
        ranks = (1, 2, 3, 4, 5)
        gone = ProcessFacts(rank=5, host="node5", pid=105, state="gone", source="x")
        verdict = verdict_on(
            record(0, awaits=ranks),
            world_size=6,
            answers=(*map(running, ranks[:-1]), gone),
            registered=tuple(range(6)),
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("gone", ranks)
        fields = verdict.event_fields(NOW)
        assert fields["awaited_causes"] == [*["busy"] * 4, "gone"]
        assert verdict.describe_awaited(NOW).startswith("rank 5 on node5")
        assert "[gone (rank 5), busy (ranks 1-4): " in verdict.describe(NOW)
        assert verdict.remedy == (
            f"rank 5: {REMEDIES['gone']}; ranks 1-4: {REMEDIES['busy']}"
        )
        assert "state of ranks 1-4 from itself" in verdict.evidence

    def test_every_remedy_of_a_living_process_lets_it_live(self) -> None:
        """Not even one that does not answer, or is in the kernel, is to be ended."""
        answers = (
            ProcessFacts(rank=1, host="n", state="stopped", detail="by a signal (T)"),
            ProcessFacts(rank=2, host="n", state="stopped", detail=IN_KERNEL),
            ProcessFacts(rank=3, host="n", state="unresponsive", detail="no answer"),
        )
        verdict = verdict_on(record(0, awaits=(1, 2, 3)), answers=answers)
        causes = [one.cause for one in verdict.awaited]
        assert causes == ["stopped", "stopped", "unknown"]
        assert len({one.action for one in verdict.awaited}) == 3
        assert "kill each" not in verdict.remedy
        assert "end that" not in verdict.remedy

    def test_living_process_that_has_not_come_is_late(self) -> None:
        """It was started, whatever it does, and is told from one that was not."""
        late = replace(running(2), registered=False)
        verdict = verdict_on(
            record(0, awaits=(2, 3)), answers=(late,), registered=(0, 1)
        )
        assert [one.cause for one in verdict.awaited] == ["late", "not_started"]
        assert "data.py:88 load_dataset" in verdict.describe_awaited(NOW)
        assert f"rank 2: {REMEDIES['late']}" in verdict.remedy

    def test_durations_are_of_the_time_at_which_they_are_shown(self) -> None:
        """Three minutes later the rank has made no call for three minutes more."""
        verdict = verdict_on(record(0, awaits=(2,)), answers=(running(2),))
        assert "no store call for 612 s" in verdict.describe(NOW)
        assert "no store call for 792 s" in verdict.describe(NOW + 180)
        read = Verdict.from_bytes(verdict.to_bytes())
        assert read is not None
        assert read.describe(NOW + 180) == verdict.describe(NOW + 180)


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

    def test_ranks_that_wait_for_a_circle_have_not_diverged(self) -> None:
        """Ranks in other groups wait for it; they are not named."""
        verdict = verdict_on(
            *(record(rank, awaits=(4,), group="2", key="2/4") for rank in (5, 6, 7)),
            record(4, awaits=(5, 6, 7), group="6", key="6/1"),
            record(0, awaits=(4,), group="3", key="3/1"),
            record(2, awaits=(6,), group="5", key="5/1"),
            *(record(rank, members=(0, 1, 2, 3), group="1") for rank in (1, 3)),
            world_size=8,
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("diverged", (4,))

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
