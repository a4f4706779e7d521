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
from tracedstore.diagnosis import inquiry
from tracedstore.diagnosis.blocked_call import Member
from tracedstore.diagnosis.blocked_record import BlockedRecord, publish_blocked
from tracedstore.diagnosis.process_answer import ProcessAnswer
from tracedstore.diagnosis.verdict import Verdict

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

    def answer(*answers: ProcessAnswer) -> None:
        found = {one.rank: one for one in answers}

        def examine(*args: Any, **_kwargs: Any) -> dict[int, ProcessAnswer]:
            return {rank: found[rank] for rank in args[2] if rank in found}

        monkeypatch.setattr(inquiry, "examine", examine)

    return answer


def running(rank: int, operation: str = "") -> ProcessAnswer:
    """Return the answer of a process that runs."""
    return ProcessAnswer(
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
        self, store: HashStore, answering: Answering, answer: ProcessAnswer
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
