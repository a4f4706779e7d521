"""Many threads on one traced store: torch's collectives, and exact counts."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch._C._distributed_c10d import _StoreCollectives
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from integration.harness import (
    all_counted,
    counted,
    in_background,
    in_threads,
    results,
    wait_until,
)
from support.stores import SHORT

RANKS = 4
LONG = timedelta(seconds=15)


@pytest.fixture
def store(registry: CollectorRegistry) -> tracedstore.TracedStore:
    """A traced HashStore that counts into the test's own registry."""
    tracedstore.configure(registry=registry, log_format="off")
    return tracedstore.wrap(HashStore())


def collectives(store: Store, rank: int) -> Any:
    """What torch has, in C++; Any, because its stubs have the signatures wrong."""
    return _StoreCollectives(store, rank, RANKS)


class TestStoreCollectives:
    """torch's collectives over a store, which call it from C++."""

    def test_barrier(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Nobody leaves before everybody came."""
        came: list[int] = []

        def meet(rank: int) -> int:
            came.append(rank)
            collectives(store, rank).barrier("meet", LONG, True)
            return len(came)

        assert results(in_threads(RANKS, meet)) == [RANKS] * RANKS
        assert counted(registry, "hash_store", "wait") >= 1

    def test_broadcast(self, store: tracedstore.TracedStore) -> None:
        """Everybody hears what one says."""

        def hear(rank: int) -> bytes | None:
            if rank == 0:
                collectives(store, rank).broadcast_send("news", "hello", LONG)
                return None
            heard: bytes = collectives(store, rank).broadcast_recv("news", LONG)
            return heard

        assert results(in_threads(RANKS, hear)) == [None, *[b"hello"] * (RANKS - 1)]

    def test_gather(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """One hears what everybody says, in order."""

        def tell(rank: int) -> list[bytes] | None:
            if rank != 0:
                collectives(store, rank).gather_send("names", f"rank {rank}", LONG)
                return None
            heard: list[bytes] = collectives(store, rank).gather_recv(
                "names", "rank 0", LONG
            )
            return heard

        heard, *others = results(in_threads(RANKS, tell))

        assert heard == [b"rank 0", b"rank 1", b"rank 2", b"rank 3"]
        assert others == [None] * (RANKS - 1)
        assert counted(registry, "hash_store", "multi_get") == 1

    def test_scatter(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Each gets its own."""
        parts = ["a", "b", "c", "d"]

        def take(rank: int) -> bytes:
            if rank == 0:
                taken = collectives(store, rank).scatter_send("parts", parts, LONG)
            else:
                taken = collectives(store, rank).scatter_recv("parts", LONG)
            return bytes(taken)

        assert results(in_threads(RANKS, take)) == [b"a", b"b", b"c", b"d"]
        assert counted(registry, "hash_store", "multi_set") == 1

    def test_all_sum(self, store: tracedstore.TracedStore) -> None:
        """Everybody has the same sum."""

        def add(rank: int) -> int:
            total: int = collectives(store, rank).all_sum("sum", rank + 1, LONG)
            return total

        assert results(in_threads(RANKS, add)) == [10] * RANKS

    def test_barrier_that_nobody_else_comes_to(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """The error names those that are missing, as it does with a bare store."""
        for each in (HashStore(), store):
            with pytest.raises(RuntimeError, match=r"missing ranks: 0, 2, 3.*timeout"):
                collectives(each, 1).barrier("alone", SHORT, True)

        assert counted(registry, "hash_store", "wait", "timeout") == 1


class TestExactCounts:
    """Counting takes no lock, and loses nothing."""

    def test_from_python(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """16 threads with 10,000 calls each are 160,000 calls."""

        def add(_number: int) -> None:
            for _ in range(10_000):
                store.add("n", 1)

        results(in_threads(16, add))

        assert all_counted(registry) == {"hash_store.add": 160_000}
        assert store.add("n", 0) == 160_000

    def test_from_cpp(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """So are those that come through torch's C++, from 8 threads."""
        above = PrefixStore("p", store)

        def add(_number: int) -> None:
            for _ in range(10_000):
                above.add("n", 1)

        results(in_threads(8, add))

        assert all_counted(registry) == {"hash_store.add": 80_000}
        assert above.add("n", 0) == 80_000

    def test_calls_that_fail(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """Timeouts in many threads are counted as such, each of them."""

        def wait(number: int) -> None:
            for _ in range(50):
                with pytest.raises(RuntimeError, match="timeout"):
                    store.wait([f"never/{number}"], timedelta(milliseconds=1))

        results(in_threads(8, wait))

        assert counted(registry, "hash_store", "wait", "timeout") == 400
        assert counted(registry, "hash_store", "wait") == 0
        assert tracedstore.in_flight() == []

    def test_scraped_meanwhile(
        self, store: tracedstore.TracedStore, registry: CollectorRegistry
    ) -> None:
        """What a scrape sees while threads count only ever grows."""

        def add(_number: int) -> None:
            for _ in range(5_000):
                store.add("n", 1)

        seen: list[float] = []

        def scrape() -> bool:
            seen.append(counted(registry, "hash_store", "add"))
            return seen[-1] >= 40_000

        counting = in_background(lambda: results(in_threads(8, add)))
        wait_until(scrape)
        counting.result(15)

        assert seen == sorted(seen)
        assert counted(registry, "hash_store", "add") == 40_000
