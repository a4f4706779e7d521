"""The ledger of a collective: who is there, in one read for any number of ranks."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.judgement.inquiry import inquire
from tracedstore.diagnosis.observe import collective_ledger
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    CollectivePosition,
    publish_blocked,
)

WORLD_SIZE = 2048
LATE = 77
POSITION = CollectivePosition(
    group="0",
    description="default_pg",
    number=7,
    operation="all_reduce",
    sizes="[10]",
    dtype="Float",
    place="train.py:88 step",
)


class CountingStore:
    """Counts the keys that are read of a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.read = 0

    def multi_get(self, keys: Sequence[str]) -> Any:
        """Count them."""
        self.read += len(keys)
        return self._store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def record(rank: int, awaits: tuple[int, ...] | None) -> BlockedRecord:
    """Return the record of a rank in the collective."""
    return BlockedRecord(
        rank=rank,
        host="node1",
        pid=100 + rank,
        operation="all_reduce",
        keys=(),
        phase=POSITION.phase,
        protocol="collective",
        group="0/7",
        awaits=awaits,
        started=time.time() - 40,
        collective=POSITION,
    )


def store_of(ranks: Sequence[int]) -> CountingStore:
    """Return a store in which these ranks wait."""
    store = dist.HashStore()
    for rank in ranks:
        collective_ledger.enter(store, rank, POSITION, 0)
    return CountingStore(store)


def test_ranks_and_digests() -> None:
    """A rank that called something else has another digest."""
    store = store_of([3, 1])
    collective_ledger.enter(store, 2, replace(POSITION, sizes="[11]"), 0)

    found = collective_ledger.read_entered(store, POSITION, 0, 4)

    assert found.keys() == {1, 2, 3}
    assert found[1] == found[3] != found[2]
    # Another attempt, another number, and ranks that the job does not have.
    assert not collective_ledger.read_entered(store, POSITION, 1, 4)
    later = replace(POSITION, number=8)
    assert not collective_ledger.read_entered(store, later, 0, 4)
    assert collective_ledger.read_entered(store, POSITION, 0, 2).keys() == {1}


def test_a_group_that_was_created_before() -> None:
    """Its numbers began again, and its entries do not count."""
    store = store_of([1])

    since = time.time() + 3600
    assert not collective_ledger.read_entered(
        store, replace(POSITION, since=since), 0, 4
    )


@pytest.mark.parametrize(
    "value", [b"\xff\x00;;", b"1:zz:5;", b"9" * 100, b"1:01234567:99;" * 100_000]
)
def test_hostile_ledger(value: bytes) -> None:
    """Any client of the store can write it."""
    store: Any = dist.HashStore()
    store.set(collective_ledger.ledger_key(POSITION, 0), value)

    found = collective_ledger.read_entered(store, POSITION, 0, 4)

    assert found.keys() <= {0, 1, 2, 3}


def test_large_job() -> None:
    """Of 2,048 ranks, the records of a few are read, and the late one is named."""
    there = [rank for rank in range(WORLD_SIZE) if rank != LATE]
    store = store_of(there)
    for rank in there[:300]:
        publish_blocked(store, record(rank, None), first=True)
    store.read = 0
    own = record(0, (LATE,))

    verdict = inquire(
        store,
        Member(rank=0, world_size=WORLD_SIZE, host_of=lambda _: ""),
        0.1,
        call_connection=store,
        describe=lambda: own,
        records_until=0.0,
    )

    assert verdict is not None
    assert verdict.awaited_ranks == (LATE,)
    assert verdict.phase == "all_reduce 7 of group 0 (default_pg)"
    assert len(verdict.waiting_ranks) == WORLD_SIZE - 1
    assert store.read < 100
