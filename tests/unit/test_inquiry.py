"""Finding out whom a job waits for, on a HashStore."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.judgement import inquiry
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe import collective_ledger
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    CollectivePosition,
    publish_blocked,
)
from tracedstore.local.facts import ProcessFacts

Answering = Callable[..., None]
MEMBER = Member(rank=0, world_size=3, host_of=lambda _rank: "")


def record(rank: int, awaits: tuple[int, ...]) -> BlockedRecord:
    """Return the record of a rank that waits for others."""
    return BlockedRecord(
        rank=rank,
        host="node",
        pid=os.getpid(),
        operation="get",
        keys=(f"of/{rank}",),
        phase=f"key of/{rank}",
        awaits=awaits,
        started=time.time() - 10,
    )


@pytest.fixture
def store() -> HashStore:
    """A store in which three ranks have registered."""
    store = HashStore()
    for rank in range(3):
        rank_registry.register(store, rank, 3)
    return store


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Let processes answer."""

    def answer(*answers: ProcessFacts) -> None:
        found = {one.rank: one for one in answers}

        def examine(*args: Any, **_kwargs: Any) -> dict[int, ProcessFacts]:
            return {rank: found[rank] for rank in args[2] if rank in found}

        monkeypatch.setattr(inquiry, "ask_ranks", examine)

    return answer


def running(rank: int, operation: str = "") -> ProcessFacts:
    """Return the answer of a process that runs."""
    return ProcessFacts(
        rank=rank, host="node", pid=1, state="running", operation=operation
    )


def inquire(
    store: HashStore, own: BlockedRecord, records_until: float = 0.0
) -> Verdict | None:
    """Find out whom rank 0 waits for."""
    return inquiry.inquire(
        store,
        MEMBER,
        1.0,
        call_connection=store,
        describe=lambda: own,
        records_until=records_until,
    )


class TestSuspectInACall:
    """A suspect that is in a Store call may wait itself."""

    @pytest.mark.parametrize(
        "operation", ["get other", "wait other and 2 more", "barrier all"]
    )
    def test_it_is_looked_at_again(
        self, store: HashStore, answering: Answering, operation: str
    ) -> None:
        """Its record is on the way: naming it would be wrong."""
        answering(running(1, operation), running(2))
        own = record(0, awaits=(1, 2))

        assert inquire(store, own, records_until=math.inf) is None

    def test_it_is_named_later(self, store: HashStore, answering: Answering) -> None:
        """It has published nothing: it is in another store."""
        answering(running(1, "get other"))
        own = record(0, awaits=(1,))

        verdict = inquire(store, own, records_until=time.time())

        assert verdict is not None
        assert (verdict.cause, verdict.awaited_ranks) == ("busy", (1,))
        assert "alive, in get other" in verdict.describe_awaited()

    @pytest.mark.parametrize(
        "answer",
        [
            running(1, ""),
            running(1, "set other"),
            replace(running(1, "get other"), state="stopped"),
        ],
    )
    def test_another_one_is_named_at_once(
        self, store: HashStore, answering: Answering, answer: ProcessFacts
    ) -> None:
        """It publishes no record."""
        answering(answer)

        verdict = inquire(store, record(0, awaits=(1,)), records_until=math.inf)

        assert verdict is not None
        assert verdict.awaited_ranks == (1,)

    def test_one_that_is_not_awaited_does_not_count(
        self, store: HashStore, answering: Answering
    ) -> None:
        """Rank 1 has published that it waits for rank 2."""
        publish_blocked(store, record(1, awaits=(2,)), first=True)
        answering(running(1, "get of/1"), running(2))

        verdict = inquire(store, record(0, awaits=(1,)), records_until=math.inf)

        assert verdict is not None
        assert verdict.awaited_ranks == (2,)


def ended(rank: int) -> ProcessFacts:
    """Return what is known of a process that has ended."""
    return ProcessFacts(rank=rank, host="node", pid=1, state="gone")


def verdict_on(store: HashStore, own: BlockedRecord) -> tuple[str, tuple[int, ...]]:
    """Return the cause and the ranks that rank 0 finds."""
    verdict = inquire(store, own)
    assert verdict is not None
    return verdict.cause, verdict.awaited_ranks


class TestUnregistered:
    """A rank without a registration."""

    @pytest.mark.parametrize(
        ("attempt", "key", "cause"),
        [
            (0, "default_pg/0//cpu//0/2", "unknown"),
            (0, "0//cpu//0/2", "unknown"),
            (0, "0//cpu//0/1", "not_started"),
            # A restart keeps the keys.
            (1, "0//cpu//0/2", "not_started"),
        ],
    )
    def test_rank_that_has_created_its_group_has_started(
        self, answering: Answering, attempt: int, key: str, cause: str
    ) -> None:
        """Its program passed its rank to init_process_group only, and hangs."""
        store = HashStore()
        store.set(key, "address")
        answering()

        found = inquire(store, replace(record(0, awaits=(2,)), attempt=attempt))

        assert found is not None
        assert (found.cause, found.awaited_ranks) == (cause, (2,))
        started = "check that the launcher started"
        assert (started in found.remedy) == (cause == "not_started")
        seen = "rank 2: created its process group, and has not registered"
        assert (seen in found.describe()) == (cause == "unknown")


class TestFailedCall:
    """A rank whose own call has failed may end because of that."""

    def test_what_it_waited_for_counts(
        self, store: HashStore, answering: Answering
    ) -> None:
        """Rank 1 gave up first. It is rank 2 that both wait for."""
        failed = replace(record(1, awaits=(2,)), failed=time.time() - 20)
        publish_blocked(store, failed, first=True)
        answering(ended(1), running(2))

        assert verdict_on(store, record(0, awaits=(1,))) == ("busy", (2,))

    @pytest.mark.parametrize(
        ("answer", "failed", "expected"),
        [
            (ended(1), 20.0, ("circular", (0, 1))),
            # No process of its host is left to answer.
            (ProcessFacts(rank=1, host="node"), 20.0, ("circular", (0, 1))),
            # It is about to end, or to repeat its call.
            (running(1), 1.0, ("circular", (0, 1))),
            # It does something else now.
            (running(1), 20.0, ("busy", (1,))),
            # Of an earlier run, before rank 0 began to wait.
            (ended(1), 600.0, ("gone", (1,))),
            # It was killed in its wait.
            (ended(1), None, ("gone", (1,))),
        ],
        ids=["ended", "silent", "ends", "outlives", "of an earlier run", "killed"],
    )
    def test_ranks_that_wait_for_each_other(
        self,
        store: HashStore,
        answering: Answering,
        answer: ProcessFacts,
        failed: float | None,
        expected: tuple[str, tuple[int, ...]],
    ) -> None:
        """Rank 1 has waited for rank 0, which waits for rank 1."""
        since = None if failed is None else time.time() - failed
        waited = replace(record(1, awaits=(0,)), failed=since)
        publish_blocked(store, waited, first=True)
        answering(answer)

        assert verdict_on(store, record(0, awaits=(1,))) == expected

    def test_text(self, store: HashStore, answering: Answering) -> None:
        """It says that the rank does not wait any more."""
        failed = replace(record(1, awaits=(0,)), failed=time.time())
        publish_blocked(store, failed, first=True)
        answering(ended(1))

        verdict = inquire(store, record(0, awaits=(1,)))

        assert verdict is not None
        text = "waited in key of/1, for rank 0, until its call failed"
        assert verdict.awaited[1].doing == text

    def test_candidate(self, store: HashStore, answering: Answering) -> None:
        """The writer of the key is unknown. Rank 1 waited for it too, and has ended."""
        own = replace(record(0, awaits=()), awaits=None)
        publish_blocked(store, replace(own, rank=1, failed=time.time()), first=True)
        answering(ended(1), running(2))

        assert verdict_on(store, own) == ("busy", (2,))

    def test_verdict_still_holds(self, store: HashStore) -> None:
        """Whether it names the rank that has failed, or the one that this awaited."""
        own = record(0, awaits=(1,))
        failed = replace(record(1, awaits=(2,)), failed=time.time())
        publish_blocked(store, failed, first=True)

        for rank in (1, 2):
            verdict = Verdict(phase=own.phase, cause="busy", awaited_ranks=(rank,))
            own_unknown = replace(own, awaits=None, members=(0, 1))
            assert inquiry.still_holds(store, own_unknown, MEMBER, verdict)

    def test_earlier_run_of_many_ranks(
        self, store: HashStore, answering: Answering
    ) -> None:
        """More failed records than ranks are asked: they are not looked at."""
        size = 200
        for rank in range(1, size):
            old = replace(record(rank, awaits=(0,)), failed=time.time() - 600)
            publish_blocked(store, old, first=True)
        answering(*map(ended, range(1, size)))

        verdict = inquiry.inquire(
            store,
            replace(MEMBER, world_size=size),
            1.0,
            call_connection=store,
            describe=lambda: record(0, awaits=tuple(range(1, size))),
            records_until=0.0,
        )

        assert verdict is not None
        assert verdict.awaited_ranks == tuple(range(1, size))

    def test_too_many_arrivals(self, store: HashStore) -> None:
        """A rank that has failed does not wait any more."""
        key = "all/last_member"
        store.set("all/num_members", "6")
        own = replace(record(0, awaits=()), keys=(key,))
        for rank, failed in ((1, None), (2, time.time())):
            publish_blocked(store, replace(own, rank=rank, failed=failed), first=True)

        verdict = inquire(store, own)

        assert verdict is not None
        assert (verdict.cause, verdict.waiting_ranks) == ("too_many", (0, 1))


def test_record_of_a_rank_in_the_ledger_is_awaited(store: HashStore) -> None:
    """A rank enters the ledger before its record says what it has called.

    Until then it is not known that rank 1 has called something else.
    """
    position = CollectivePosition(group="0", number=8, operation="all_reduce")
    other = replace(position, operation="broadcast")
    own = replace(record(0, awaits=()), protocol="collective", collective=position)
    for rank, called in enumerate((position, other, position)):
        collective_ledger.enter(store, rank, called, own.attempt)
    publish_blocked(store, replace(own, rank=2), first=True)

    assert inquire(store, own, records_until=math.inf) is None

    late = inquire(store, own, records_until=time.time())
    publish_blocked(store, replace(own, rank=1, collective=other), first=True)
    verdict = inquire(store, own, records_until=math.inf)

    assert late is not None
    assert (late.cause, late.awaited_ranks) == ("all_entered", ())
    assert verdict is not None
    assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (1,))


class TestConfirmation:
    """A verdict after which a process ends is confirmed by the processes it names."""

    @pytest.mark.parametrize(
        ("cause", "answer", "confirmed"),
        [
            ("gone", replace(running(2), state="gone"), True),
            ("gone", running(2), False),
            ("gone", replace(running(2), state="silent"), False),
            ("gone", None, False),
            ("mismatch", replace(running(2), collective="barrier 7 of group 0"), True),
            ("diverged", running(2, "get 0//1//cpu//0/0"), True),
            # It is elsewhere, or does not answer: someone else wrote its record.
            ("mismatch", running(2), False),
            ("mismatch", replace(running(2), state="unresponsive"), False),
            ("diverged", None, False),
        ],
    )
    def test_ranks_at_its_head(
        self,
        cause: Any,
        answer: ProcessFacts | None,
        confirmed: bool,
        store: HashStore,
        answering: Answering,
    ) -> None:
        """Each of them, but for this rank itself; not those behind them."""
        answering(*(() if answer is None else (answer,)))
        awaited = (
            AwaitedRank(rank=2, cause=cause),
            AwaitedRank(rank=1, cause="busy"),
            *((AwaitedRank(rank=0, cause=cause),) if cause != "gone" else ()),
        )
        verdict = Verdict(
            phase="p", cause=cause, awaited=awaited, awaited_ranks=(0, 1, 2)
        )

        assert inquiry.is_confirmed(store, MEMBER, verdict) is confirmed

    def test_verdict_without_ranks(self, store: HashStore) -> None:
        """It names nobody who could confirm it."""
        verdict = Verdict(phase="p", cause="gone")

        assert not inquiry.is_confirmed(store, MEMBER, verdict)
