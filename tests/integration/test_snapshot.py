"""Looking who arrived: three ways, one answer, and what each of them asks the store."""

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
from tracedstore.coordination.arrivals import Arrivals, read_arrivals, record_arrival
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.etcd.counting_client import count_requests_of

MakeEtcd = Callable[[Path], Store]


def arrive(store: Any, keys: BarrierKeys, *ranks: int) -> None:
    """Do what ranks do that arrive."""
    for rank in ranks:
        record_arrival(store, keys, rank)
        store.add(keys.num_members, 1)


class TestOneAnswer:
    """By ledger, by listing or by halving: who is missing does not depend on it."""

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

    def test_on_every_state(self, etcd_store: MakeEtcd, tmp_path: Path) -> None:
        """The ranks sign as they do in a barrier, each store in its own way."""
        ways: dict[str, Any] = {
            "ledger": tcp(tmp_path),
            "listing": etcd_store(tmp_path),
            "halving": file(tmp_path),
        }
        for number, came in enumerate(self.STATES):
            keys = BarrierKeys(f"barrier/{number}")
            found: dict[str, Arrivals] = {}
            for way, store in ways.items():
                arrive(store, keys, *came)
                found[way] = read_arrivals(store, keys, self.WORLD)

            for way, arrivals in found.items():
                assert set(arrivals.unseen_ranks) == {*range(self.WORLD)} - {*came}, way
                assert arrivals.arrived_count == len(came), way
                assert arrivals.unidentified_count == 0, way
                twice = {rank for rank in came if list(came).count(rank) > 1}
                assert set(arrivals.duplicate_ranks) == twice, way


class TestQuestions:
    """How much the store is asked, by the size of the world."""

    @pytest.fixture(autouse=True)
    def _configured(self, registry: CollectorRegistry) -> None:
        tracedstore.configure(registry=registry, log_format="off", spans="off")

    @staticmethod
    def _asked(
        registry: CollectorRegistry, store: Any, keys: BarrierKeys, world_size: int
    ) -> dict[str, float]:
        """Look, and count the calls it took."""
        before = operation_counts(registry)
        arrivals = read_arrivals(tracedstore.wrap(store), keys, world_size)
        assert arrivals.unseen_ranks == (0, world_size // 3, world_size - 1)
        return {
            name: count - before.get(name, 0)
            for name, count in operation_counts(registry).items()
            if count != before.get(name, 0)
        }

    @staticmethod
    def _came(world_size: int) -> list[int]:
        missing = {0, world_size // 3, world_size - 1}
        return [rank for rank in range(world_size) if rank not in missing]

    def test_ledger(self, registry: CollectorRegistry, tmp_path: Path) -> None:
        """The same few calls, whether sixteen came or thousands."""
        store = tcp(tmp_path)
        asked = []
        for world_size in (16, 4096):
            keys = BarrierKeys(f"barrier/{world_size}")
            arrive(store, keys, *self._came(world_size))
            asked.append(self._asked(registry, store, keys, world_size))

        assert asked[0] == asked[1]
        assert sum(asked[0].values()) <= 5

    @pytest.mark.parametrize("world_size", [16, 1024, 4096])
    def test_halving(
        self, registry: CollectorRegistry, tmp_path: Path, world_size: int
    ) -> None:
        """About m·log2(N) checks for m missing, without a ledger."""
        store: Any = tcp(tmp_path)
        keys = BarrierKeys("barrier")
        came = [keys.trace(rank) for rank in self._came(world_size)]
        store.multi_set(came, ["here"] * len(came))
        store.add(keys.num_members, len(came))

        asked = self._asked(registry, store, keys, world_size)

        checks = asked.pop("tcp_store.check")
        # Each missing one costs two checks on every level at most.
        assert 3 < checks <= 2 * 3 * (math.log2(world_size) + 1)
        assert asked == {"tcp_store.add": 1}

    def test_listing(self, etcd_store: MakeEtcd, tmp_path: Path) -> None:
        """The same few requests to etcd, whether eight came or a hundred."""
        requests = []
        for world_size in (12, 96):
            store: Any = etcd_store(tmp_path)
            keys = BarrierKeys("barrier")
            arrive(store, keys, *self._came(world_size))
            client = count_requests_of(store)
            client.start()
            arrivals = read_arrivals(store, keys, world_size)
            requests.append(client.stop().requests)
            assert arrivals.unseen_ranks == (0, world_size // 3, world_size - 1)

        assert requests[0] == requests[1] <= 8
