"""Reading arrivals in three ways: the same result, and the number of requests."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import Store

import tracedstore
from integration.harness import operation_counts
from support.stores import file, tcp
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    MissingReport,
    read_arrivals,
    record_arrival,
)
from tracedstore.etcd.request_counts import count_requests_of

MakeEtcd = Callable[[Path], Store]


def arrive(store: Any, keys: BarrierKeys, *ranks: int) -> None:
    """Record the arrival of ranks."""
    for rank in ranks:
        record_arrival(store, keys, rank)
        store.add(keys.num_members, 1)


class TestSameResult:
    """By ledger, listing or bisection, the same ranks are missing."""

    WORLD = 24
    STATES = (
        (),
        range(WORLD),
        range(1, WORLD),
        range(WORLD - 1),
        range(0, WORLD, 2),
        (5,),
        (*range(3, 20), 7, 7, 11),
    )

    def test_all_states(self, etcd_store: MakeEtcd, tmp_path: Path) -> None:
        """Each store records arrivals as a barrier does on it."""
        stores: dict[str, Any] = {
            "ledger": tcp(tmp_path),
            "listing": etcd_store(tmp_path),
            "bisection": file(tmp_path),
        }
        for number, arrived in enumerate(self.STATES):
            keys = BarrierKeys(f"barrier/{number}")
            results: dict[str, MissingReport] = {}
            for way, store in stores.items():
                arrive(store, keys, *arrived)
                results[way] = read_arrivals(store, keys, self.WORLD)

            for way, arrivals in results.items():
                assert set(arrivals.unseen_ranks) == {*range(self.WORLD)} - {
                    *arrived
                }, way
                assert arrivals.arrived_count == len(arrived), way
                assert arrivals.unidentified_count == 0, way
                twice = {rank for rank in arrived if list(arrived).count(rank) > 1}
                assert set(arrivals.duplicate_ranks) == twice, way


class TestRequests:
    """The number of requests to the store, by world size."""

    @pytest.fixture(autouse=True)
    def _configured(self, registry: CollectorRegistry) -> None:
        tracedstore.configure(registry=registry, log_format="off", spans="off")

    @staticmethod
    def _count_calls(
        registry: CollectorRegistry, store: Any, keys: BarrierKeys, world_size: int
    ) -> dict[str, float]:
        """Read the arrivals, and count the store calls."""
        before = operation_counts(registry)
        arrivals = read_arrivals(tracedstore.wrap(store), keys, world_size)
        assert arrivals.unseen_ranks == (0, world_size // 3, world_size - 1)
        return {
            name: count - before.get(name, 0)
            for name, count in operation_counts(registry).items()
            if count != before.get(name, 0)
        }

    @staticmethod
    def _arrived(world_size: int) -> list[int]:
        missing = {0, world_size // 3, world_size - 1}
        return [rank for rank in range(world_size) if rank not in missing]

    def test_ledger(self, registry: CollectorRegistry, tmp_path: Path) -> None:
        """The same few calls, whether sixteen ranks arrived or thousands."""
        store = tcp(tmp_path)
        calls = []
        for world_size in (16, 4096):
            keys = BarrierKeys(f"barrier/{world_size}")
            arrive(store, keys, *self._arrived(world_size))
            calls.append(self._count_calls(registry, store, keys, world_size))

        assert calls[0] == calls[1]
        assert sum(calls[0].values()) <= 5

    @pytest.mark.parametrize("world_size", [16, 1024, 4096])
    def test_bisection(
        self, registry: CollectorRegistry, tmp_path: Path, world_size: int
    ) -> None:
        """About m·log2(N) checks for m missing ranks, without a ledger."""
        store: Any = tcp(tmp_path)
        keys = BarrierKeys("barrier")
        arrived = [keys.trace(rank) for rank in self._arrived(world_size)]
        store.multi_set(arrived, ["here"] * len(arrived))
        store.add(keys.num_members, len(arrived))

        calls = self._count_calls(registry, store, keys, world_size)

        checks = calls.pop("tcp_store.check")
        # Each missing rank costs at most two checks on every level.
        assert 3 < checks <= 2 * 3 * (math.log2(world_size) + 1)
        assert calls == {"tcp_store.add": 2}

    def test_listing(self, etcd_store: MakeEtcd, tmp_path: Path) -> None:
        """The same few requests to etcd, whether nine ranks arrived or 93."""
        requests = []
        for world_size in (12, 96):
            store: Any = etcd_store(tmp_path)
            keys = BarrierKeys("barrier")
            arrive(store, keys, *self._arrived(world_size))
            client = count_requests_of(store)
            client.start()
            arrivals = read_arrivals(store, keys, world_size)
            requests.append(client.stop().requests)
            assert arrivals.unseen_ranks == (0, world_size // 3, world_size - 1)

        assert requests[0] == requests[1] <= 10
