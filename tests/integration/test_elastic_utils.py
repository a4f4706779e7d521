"""torch's elastic.utils.store functions, on traced stores and on bare ones."""

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
    """A store with and without the wrapper, which may be above or below a prefix."""

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
    """Count into the test's registry."""
    tracedstore.configure(registry=registry, log_format="off")


@pytest.fixture
def tcp_client(tmp_path: Path) -> Make:
    """Return a function that connects to one server."""
    server = tcp(tmp_path)
    return lambda: dist.TCPStore("127.0.0.1", server.port, None, is_master=False)


@pytest.fixture
def file_store(tmp_path: Path) -> Make:
    """Return a function that opens one file."""
    return lambda: dist.FileStore(str(tmp_path / "store"), -1)


@pytest.mark.parametrize("kind", ["tcp_client", "file_store"])
class TestAllRanks:
    """All ranks take part, each with its store and thread."""

    @pytest.fixture
    def stores(
        self, request: pytest.FixtureRequest, kind: str, shape: Shape
    ) -> list[Any]:
        """Return the stores of all ranks."""
        make: Make = request.getfixturevalue(kind)
        return [shape.traced(make()) for _ in range(RANKS)]

    def test_barrier(self, stores: list[Any], kind: str, shape: Shape) -> None:
        """No rank returns before all have arrived, and timeouts are restored."""
        arrived: list[int] = []
        before = [store.timeout for store in stores]

        def run_barrier(rank: int) -> int:
            arrived.append(rank)
            barrier(stores[rank], RANKS, "meet", barrier_timeout=15)
            return len(arrived)

        assert results(in_threads(RANKS, run_barrier)) == [RANKS] * RANKS
        assert [store.timeout for store in stores] == before

    def test_get_all(self, stores: list[Any], kind: str, shape: Shape) -> None:
        """All ranks read the values of all ranks."""

        def exchange(rank: int) -> list[bytes]:
            stores[rank].set(f"data{rank}", f"of {rank}")
            return list(get_all(stores[rank], rank, "data", RANKS))

        values = [b"of 0", b"of 1", b"of 2", b"of 3"]
        assert results(in_threads(RANKS, exchange)) == [values] * RANKS

    def test_synchronize(
        self,
        registry: CollectorRegistry,
        stores: list[Any],
        kind: str,
        shape: Shape,
    ) -> None:
        """All ranks exchange values, and the calls inside are counted."""

        def exchange(rank: int) -> list[bytes]:
            own = f"of {rank}".encode()
            return synchronize(stores[rank], own, rank, RANKS, "sync", 15)

        values = [b"of 0", b"of 1", b"of 2", b"of 3"]
        assert results(in_threads(RANKS, exchange)) == [values] * RANKS
        label = kind.replace("client", "store")
        calls = {
            operation: operation_count(registry, label, operation)
            for operation in ("add", "multi_get", "wait")
        }
        assert calls == {"add": RANKS, "multi_get": RANKS, "wait": 1}


class TestMissingRank:
    """One rank does not arrive, and the others time out."""

    def test_same_errors(
        self, registry: CollectorRegistry, tcp_client: Make, shape: Shape
    ) -> None:
        """Each rank's error is the same as with bare stores."""
        present = RANKS - 1
        bare = [shape.bare(tcp_client()) for _ in range(present)]
        traced = [shape.traced(tcp_client()) for _ in range(present)]
        stores = bare + traced

        def run_barrier(number: int) -> str:
            # Two barriers in parallel, one with bare and one with traced stores.
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

        errors = results(in_threads(2 * present, run_barrier))

        assert errors[:present] == errors[present:]
        assert "missing_ranks=[host-3]" in errors[0]
        assert all("check rank 0 (host-0)" in error for error in errors[1:present])
        # torch does not restore the timeout when a barrier fails.
        assert {store.timeout for store in stores} == {timedelta(seconds=1)}
        # All ranks timed out in one wait, rank 0 also in the wait for the TRACE key.
        assert operation_count(registry, "tcp_store", "wait", "timeout") == present + 1
