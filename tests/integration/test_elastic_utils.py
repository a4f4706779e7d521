"""The helpers torch has for its agents, on traced stores as on bare ones."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.utils.store import barrier, get_all, synchronize

import tracedstore
from integration.harness import in_threads, operation_count, results
from support.stores import tcp

RANKS = 4

Make = Callable[[], Store]


@dataclass(frozen=True)
class Shape:
    """Where the wrapper stands, and the same without it."""

    bare: Callable[[Store], Any]
    traced: Callable[[Store], Any]


SHAPES = {
    "direct": Shape(bare=lambda store: store, traced=tracedstore.wrap),
    "under-prefix": Shape(
        bare=lambda store: PrefixStore("p", store),
        traced=lambda store: PrefixStore("p", tracedstore.wrap(store)),
    ),
    "over-prefix": Shape(
        bare=lambda store: PrefixStore("p", store),
        traced=lambda store: tracedstore.wrap(PrefixStore("p", store)),
    ),
}

pytestmark = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def telemetry(registry: CollectorRegistry) -> None:
    """Count into the test's own registry."""
    tracedstore.configure(registry=registry, log_format="off")


@pytest.fixture
def tcp_client(tmp_path: Path) -> Make:
    """Connect to one server, as each rank does."""
    server = tcp(tmp_path)
    return lambda: dist.TCPStore("127.0.0.1", server.port, None, is_master=False)


@pytest.fixture
def file_store(tmp_path: Path) -> Make:
    """Open one file, as each rank does."""
    return lambda: dist.FileStore(str(tmp_path / "store"), -1)


@pytest.mark.parametrize("kind", ["tcp_client", "file_store"])
class TestEverybodyComes:
    """Each rank has a store of its own, and a thread."""

    @pytest.fixture
    def stores(
        self, request: pytest.FixtureRequest, kind: str, shape: Shape
    ) -> list[Any]:
        """The stores of all ranks."""
        make: Make = request.getfixturevalue(kind)
        return [shape.traced(make()) for _ in range(RANKS)]

    def test_barrier(self, stores: list[Any], kind: str, shape: Shape) -> None:
        """Nobody leaves before everybody came, and timeouts are as before."""
        came: list[int] = []
        before = [store.timeout for store in stores]

        def meet(rank: int) -> int:
            came.append(rank)
            barrier(stores[rank], RANKS, "meet", barrier_timeout=15)
            return len(came)

        assert results(in_threads(RANKS, meet)) == [RANKS] * RANKS
        assert [store.timeout for store in stores] == before

    def test_get_all(self, stores: list[Any], kind: str, shape: Shape) -> None:
        """Everybody reads what everybody wrote."""

        def exchange(rank: int) -> list[bytes]:
            stores[rank].set(f"data{rank}", f"of {rank}")
            return list(get_all(stores[rank], rank, "data", RANKS))

        everything = [b"of 0", b"of 1", b"of 2", b"of 3"]
        assert results(in_threads(RANKS, exchange)) == [everything] * RANKS

    def test_synchronize(
        self,
        registry: CollectorRegistry,
        stores: list[Any],
        kind: str,
        shape: Shape,
    ) -> None:
        """So they do in one step, and each step of it is counted."""

        def exchange(rank: int) -> list[bytes]:
            mine = f"of {rank}".encode()
            return synchronize(stores[rank], mine, rank, RANKS, "sync", 15)

        everything = [b"of 0", b"of 1", b"of 2", b"of 3"]
        assert results(in_threads(RANKS, exchange)) == [everything] * RANKS
        label = kind.replace("client", "store")
        calls = {
            operation: operation_count(registry, label, operation)
            for operation in ("add", "multi_get", "wait")
        }
        assert calls == {"add": RANKS, "multi_get": RANKS, "wait": 1}


class TestSomebodyIsMissing:
    """One rank does not come, and the others time out."""

    def test_as_bare(
        self, registry: CollectorRegistry, tcp_client: Make, shape: Shape
    ) -> None:
        """Each rank is told the same as with bare: who is missing, or whom to ask."""
        present = RANKS - 1
        bare = [shape.bare(tcp_client()) for _ in range(present)]
        traced = [shape.traced(tcp_client()) for _ in range(present)]
        stores = bare + traced

        def meet(number: int) -> str:
            # Two barriers at once, one of bare and one of traced stores.
            which, rank = divmod(number, present)
            with pytest.raises(dist.DistStoreError) as raised:
                barrier(
                    stores[number],
                    RANKS,
                    f"meet/{which}",
                    barrier_timeout=1.0,
                    rank=rank,
                    rank_tracing_decoder=lambda rank: f"host-{rank}",
                    trace_timeout=0.2,
                )
            return str(raised.value).replace(f"meet/{which}", "meet")

        told = results(in_threads(2 * present, meet))

        assert told[:present] == told[present:]
        assert "missing_ranks=[host-3]" in told[0]
        assert all("check rank 0 (host-0)" in each for each in told[1:present])
        # torch leaves its own timeout behind when a barrier fails.
        assert {store.timeout for store in stores} == {timedelta(seconds=1)}
        # Everybody waited in vain for the last one, and rank 0 for its trace too.
        assert operation_count(registry, "tcp_store", "wait", "timeout") == present + 1
