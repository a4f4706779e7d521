"""Our barrier in the place of torch's, and out of it again."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils import distributed as torchs_distributed
from torch.distributed.elastic.utils import store as torchs_store

import tracedstore
from integration.harness import in_threads, results
from tracedstore import barrier_patch
from tracedstore.coordination import membership
from tracedstore.coordination.membership import Membership
from tracedstore.core.recorder import RECORDER

TORCHS = torchs_store.barrier


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No events, and torch's own barrier afterwards."""
    barrier_patch.restore()
    tracedstore.configure(log_format="off")
    yield
    barrier_patch.restore()


class TestReplacing:
    """Idempotent and reversible."""

    def test_there_and_back(self) -> None:
        """In both of the places where torch has it."""
        for _ in range(2):
            barrier_patch.replace()
            barrier_patch.replace()
            assert torchs_store.barrier is barrier_patch.barrier
            assert torchs_distributed.barrier is barrier_patch.barrier
            barrier_patch.restore()
            barrier_patch.restore()
            assert torchs_store.barrier is TORCHS
            assert torchs_distributed.barrier is TORCHS

    def test_somebody_elses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was put over ours meanwhile stays."""
        # Undone last, after the fixture's restore: torch's own is back then.
        monkeypatch.setattr(torchs_store, "barrier", TORCHS)
        barrier_patch.replace()

        theirs: Any = partial(TORCHS)
        monkeypatch.setattr(torchs_store, "barrier", theirs)
        barrier_patch.restore()

        assert torchs_store.barrier is theirs
        assert torchs_distributed.barrier is TORCHS


class TestBarrier:
    """What torch's callers get."""

    def test_completes(self) -> None:
        """As torch's does, with its arguments by name and by position."""
        barrier_patch.replace()
        store = dist.HashStore()

        def come(number: int) -> None:
            if number:
                torchs_store.barrier(store, 2, "key", 10)
            else:
                torchs_store.barrier(
                    store=store, world_size=2, key_prefix="key", barrier_timeout=10
                )

        results(in_threads(2, come))

    def test_place(self) -> None:
        """A caller without a rank has the one that is known for its store."""
        barrier_patch.replace()
        store = dist.HashStore()
        membership.record(store, Membership(1, 3, lambda rank: f"node-{rank}"))

        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torchs_store.barrier(store, 3, "key", 0.1)

        assert raised.value.rank == 1
        assert raised.value.missing_names == ("node-0", "node-2")

    @pytest.mark.parametrize("rank", [None, 0])
    def test_another_world(self, rank: int | None) -> None:
        """A place in another world says nothing, nor one where a rank is given."""
        barrier_patch.replace()
        store = dist.HashStore()
        membership.record(store, Membership(1, 3 if rank is not None else 4, str))

        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torchs_store.barrier(store, 3, "key", 0.1, rank, trace_timeout=0.1)

        assert raised.value.rank == rank

    def test_torchs_assertion(self) -> None:
        """A decoder without a rank is refused, as torch refuses it."""
        barrier_patch.replace()
        store = dist.HashStore()
        membership.record(store, Membership(1, 3, str))
        with pytest.raises(AssertionError, match="Tracing requires rank information"):
            torchs_store.barrier(store, 3, "key", 0.1, rank_tracing_decoder=str)

    def test_a_place_goes_with_its_store(self) -> None:
        """Nothing is kept of a store that is gone."""
        store = dist.HashStore()
        membership.record(store, Membership(0, 1, str))
        before = len(membership._memberships)
        del store

        assert len(membership._memberships) == before - 1
        assert membership.of(dist.HashStore()) is None
        assert membership.of([]) is None


class TestTorchsOwn:
    """Nobody asked for ours, so torch's it is where there is no telemetry."""

    @pytest.fixture(autouse=True)
    def replaced(self, quiet: None) -> None:
        """Ours stands in its place."""
        barrier_patch.replace()

    def test_settings_that_are_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They do not become an error of the job's."""
        tracedstore.shutdown(timeout=1)
        monkeypatch.setenv("TRACEDSTORE_SLOW_AFTER", "10ms")

        torchs_store.barrier(dist.HashStore(), 1, "b")

        assert RECORDER.failures.counts()["barriers"] == 1

    def test_switched_off(self) -> None:
        """Then it writes what torch's does, and nothing else."""
        tracedstore.configure(disabled=True)
        store = dist.HashStore()
        torchs_store.barrier(store, 1, "b", 5, 0)

        with pytest.raises(dist.DistStoreError) as raised:
            torchs_store.barrier(store, 2, "c", 0.1, 0, trace_timeout=0.1)
        assert not isinstance(raised.value, tracedstore.BarrierTimeout)
        assert not store.check(["b/ARRIVALS"])

    def test_ends_when_torchs_does(self) -> None:
        """Who gave no rank does not wait for the names of others."""
        began = time.monotonic()
        with pytest.raises(tracedstore.BarrierTimeout):
            torchs_store.barrier(dist.HashStore(), 2, "b", 0.1, trace_timeout=50)

        assert time.monotonic() - began < 20
