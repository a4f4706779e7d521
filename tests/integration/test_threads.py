"""Many threads on one traced store: torch's collectives and exact counts."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from integration.harness import (
    in_background,
    in_threads,
    operation_count,
    operation_counts,
    results,
    wait_until,
)
from support.native import on_both_bases
from support.stores import SHORT
from support.versions import TORCH, WITHOUT_COLLECTIVES, needs_collectives

if TORCH < WITHOUT_COLLECTIVES:
    from torch._C._distributed_c10d import _StoreCollectives

pytestmark = [pytest.mark.usefixtures("core"), on_both_bases]

RANKS = 4
LONG = timedelta(seconds=15)


@pytest.fixture
def store(registry: CollectorRegistry) -> tracedstore.TracedStore:
    """Return a traced HashStore that exports to the test's registry."""
    tracedstore.configure(registry=registry, log_format="off")
    return tracedstore.wrap(HashStore())


def collectives(store: Store, rank: int) -> Any:
    """Return torch's C++ collectives; Any, because the stubs' signatures are wrong."""
    return _StoreCollectives(store, rank, RANKS)


@needs_collectives
class TestStoreCollectives:
    """torch's collectives, which call the store from C++."""

    def test_barrier(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """No rank leaves before all have arrived."""
        arrived: list[int] = []

        def call(rank: int) -> int:
            arrived.append(rank)
            collectives(store, rank).barrier("barrier", LONG, True)
            return len(arrived)

        assert results(in_threads(RANKS, call)) == [RANKS] * RANKS
        assert operation_count(registry, "hash_store", "wait") >= 1

    def test_broadcast(self, store: tracedstore.TracedStore) -> None:
        """All other ranks receive the value of rank 0."""

        def broadcast(rank: int) -> bytes | None:
            if rank == 0:
                collectives(store, rank).broadcast_send("key", "value", LONG)
                return None
            received: bytes = collectives(store, rank).broadcast_recv("key", LONG)
            return received

        expected = [None, *[b"value"] * (RANKS - 1)]
        assert results(in_threads(RANKS, broadcast)) == expected

    def test_gather(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Rank 0 receives the values of all ranks in order."""

        def gather(rank: int) -> list[bytes] | None:
            if rank != 0:
                collectives(store, rank).gather_send("names", f"rank {rank}", LONG)
                return None
            received: list[bytes] = collectives(store, rank).gather_recv(
                "names", "rank 0", LONG
            )
            return received

        gathered, *others = results(in_threads(RANKS, gather))

        assert gathered == [b"rank 0", b"rank 1", b"rank 2", b"rank 3"]
        assert others == [None] * (RANKS - 1)
        assert operation_count(registry, "hash_store", "multi_get") == 1

    def test_scatter(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Each rank receives its part."""
        parts = ["a", "b", "c", "d"]

        def scatter(rank: int) -> bytes:
            if rank == 0:
                part = collectives(store, rank).scatter_send("parts", parts, LONG)
            else:
                part = collectives(store, rank).scatter_recv("parts", LONG)
            return bytes(part)

        assert results(in_threads(RANKS, scatter)) == [b"a", b"b", b"c", b"d"]
        assert operation_count(registry, "hash_store", "multi_set") == 1

    def test_all_sum(self, store: tracedstore.TracedStore) -> None:
        """All ranks have the same sum."""

        def add(rank: int) -> int:
            total: int = collectives(store, rank).all_sum("sum", rank + 1, LONG)
            return total

        assert results(in_threads(RANKS, add)) == [10] * RANKS

    def test_barrier_times_out(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """The error has the missing ranks, as with a bare store."""
        for each in (HashStore(), store):
            with pytest.raises(RuntimeError, match=r"missing ranks: 0, 2, 3.*timeout"):
                collectives(each, 1).barrier("alone", SHORT, True)

        assert operation_count(registry, "hash_store", "wait", "timeout") == 1


class TestExactCounts:
    """Counters take no lock and lose no call."""

    def test_from_python(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """16 threads with 10,000 calls each count 160,000 calls."""

        def add(_number: int) -> None:
            for _ in range(10_000):
                store.add("n", 1)

        results(in_threads(16, add))

        assert operation_counts(registry) == {"hash_store.add": 160_000}
        assert store.add("n", 0) == 160_000

    def test_from_cpp(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """8 threads with 10,000 calls each through torch's C++ count 80,000 calls."""
        above = PrefixStore("p", store)

        def add(_number: int) -> None:
            for _ in range(10_000):
                above.add("n", 1)

        results(in_threads(8, add))

        assert operation_counts(registry) == {"hash_store.add": 80_000}
        assert above.add("n", 0) == 80_000

    def test_calls_that_fail(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Every timeout in many threads is counted as a timeout."""

        def wait(number: int) -> None:
            for _ in range(50):
                with pytest.raises(RuntimeError, match="timeout"):
                    store.wait([f"never/{number}"], timedelta(milliseconds=1))

        results(in_threads(8, wait))

        assert operation_count(registry, "hash_store", "wait", "timeout") == 400
        assert operation_count(registry, "hash_store", "wait") == 0
        assert tracedstore.in_flight() == []

    def test_concurrent_scrapes(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """The counts of scrapes during the calls never decrease."""

        def add(_number: int) -> None:
            for _ in range(5_000):
                store.add("n", 1)

        counts: list[float] = []

        def scrape() -> bool:
            counts.append(operation_count(registry, "hash_store", "add"))
            return counts[-1] >= 40_000

        counting = in_background(lambda: results(in_threads(8, add)))
        wait_until(scrape)
        counting.result(60)

        assert counts == sorted(counts)
        assert operation_count(registry, "hash_store", "add") == 40_000
