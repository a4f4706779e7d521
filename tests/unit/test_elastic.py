"""Drop-ins for torch's functions, and the barrier in place of torch's."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.elastic.utils import distributed as torch_distributed
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from integration.harness import in_threads, results
from tracedstore import elastic
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import Member
from tracedstore.recording.recorder import RECORDER

TORCH_BARRIER = torch_store.barrier


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Emit no events, and restore torch's barrier after the test."""
    elastic.restore_torch_barrier()
    tracedstore.configure(log_format="off")
    yield
    elastic.restore_torch_barrier()


class TestReplace:
    """replace() and restore() are idempotent and inverse."""

    def test_replace_and_restore(self) -> None:
        """Both modules of torch that have the function are patched."""
        for _ in range(2):
            elastic.replace_torch_barrier()
            elastic.replace_torch_barrier()
            assert torch_store.barrier is elastic.barrier_for_torch
            assert torch_distributed.barrier is elastic.barrier_for_torch
            elastic.restore_torch_barrier()
            elastic.restore_torch_barrier()
            assert torch_store.barrier is TORCH_BARRIER
            assert torch_distributed.barrier is TORCH_BARRIER

    def test_later_patch_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """restore() keeps a function that was patched over ours."""
        # Undone after the fixture's restore(), which brings torch's barrier back.
        monkeypatch.setattr(torch_store, "barrier", TORCH_BARRIER)
        elastic.replace_torch_barrier()

        later_patch: Any = partial(TORCH_BARRIER)
        monkeypatch.setattr(torch_store, "barrier", later_patch)
        elastic.restore_torch_barrier()

        assert torch_store.barrier is later_patch
        assert torch_distributed.barrier is TORCH_BARRIER


class TestBarrier:
    """The replaced barrier for callers of torch's function."""

    def test_completes(self) -> None:
        """It completes with torch's arguments by name and by position."""
        elastic.replace_torch_barrier()
        store = dist.HashStore()

        def call(number: int) -> None:
            if number:
                torch_store.barrier(store, 2, "key", 10)
            else:
                torch_store.barrier(
                    store=store, world_size=2, key_prefix="key", barrier_timeout=10
                )

        results(in_threads(2, call))

    def test_membership(self) -> None:
        """A caller without a rank uses the rank recorded for its store."""
        elastic.replace_torch_barrier()
        store = dist.HashStore()
        rank_registry.record_agent(
            store, Member(rank=1, world_size=3, host_of=lambda rank: f"node-{rank}")
        )

        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torch_store.barrier(store, 3, "key", 0.1)

        assert raised.value.rank == 1
        assert raised.value.missing_names == ("node-0", "node-2")

    @pytest.mark.parametrize("rank", [None, 0])
    def test_membership_is_ignored(self, rank: int | None) -> None:
        """A recorded rank is ignored for another world size or with a rank given."""
        elastic.replace_torch_barrier()
        store = dist.HashStore()
        rank_registry.record_agent(
            store, Member(rank=1, world_size=3 if rank is not None else 4, host_of=str)
        )

        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torch_store.barrier(store, 3, "key", 0.1, rank, trace_timeout=0.1)

        assert raised.value.rank == rank

    def test_decoder_needs_rank(self) -> None:
        """A decoder without a rank raises torch's AssertionError."""
        elastic.replace_torch_barrier()
        store = dist.HashStore()
        rank_registry.record_agent(store, Member(rank=1, world_size=3, host_of=str))
        with pytest.raises(AssertionError, match="Tracing requires rank information"):
            torch_store.barrier(store, 3, "key", 0.1, rank_tracing_decoder=str)

    def test_membership_is_freed_with_its_store(self) -> None:
        """Nothing is kept of a store that was freed."""
        store = dist.HashStore()
        rank_registry.record_agent(store, Member(rank=0, world_size=1, host_of=str))
        before = len(rank_registry._agents)
        del store

        assert len(rank_registry._agents) == before - 1
        assert rank_registry.agent_in(dist.HashStore()) is None
        assert rank_registry.agent_in([]) is None


class TestFallback:
    """Without telemetry the replaced barrier calls torch's."""

    @pytest.fixture(autouse=True)
    def replaced(self, quiet: None) -> None:
        """Replace torch's barrier."""
        elastic.replace_torch_barrier()

    def test_invalid_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Invalid settings count as a failure and do not raise into the job."""
        tracedstore.shutdown(timeout=1)
        monkeypatch.setenv("TRACEDSTORE_SLOW_AFTER", "10ms")

        torch_store.barrier(dist.HashStore(), 1, "b")

        assert RECORDER.failures.counts()["barriers"] == 1

    def test_disabled(self) -> None:
        """disabled=True writes the same keys as torch and no others."""
        tracedstore.configure(disabled=True)
        store = dist.HashStore()
        torch_store.barrier(store, 1, "b", 5, 0)

        with pytest.raises(dist.DistStoreError) as raised:
            torch_store.barrier(store, 2, "c", 0.1, 0, trace_timeout=0.1)
        assert not isinstance(raised.value, tracedstore.BarrierTimeout)
        assert not store.check(["b/ARRIVALS"])

    def test_times_out_when_torch_does(self) -> None:
        """A caller without a rank does not wait for the names of other ranks."""
        with pytest.raises(tracedstore.BarrierTimeout):
            torch_store.barrier(dist.HashStore(), 2, "b", 0.1, trace_timeout=2000)


class TestSignatures:
    """The functions are drop-in replacements for torch's."""

    @pytest.mark.parametrize("name", ["store_timeout", "get_all", "synchronize"])
    def test_same_parameters(self, name: str) -> None:
        """Names, order and defaults of the parameters are torch's."""

        def parameters(module: Any) -> list[tuple[str, Any]]:
            signature = inspect.signature(getattr(module, name))
            return [(p.name, p.default) for p in signature.parameters.values()]

        assert parameters(tracedstore) == parameters(torch_store)


class TestStoreTimeout:
    """The store's timeout is restored."""

    def test_restored(self) -> None:
        """It is restored on success, and on failure too, where torch's is not."""
        store = HashStore()
        store.set_timeout(timedelta(seconds=9))
        with elastic.store_timeout(store, 0.05):
            assert store.timeout == timedelta(milliseconds=50)  # type: ignore[attr-defined]
        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]

        with pytest.raises(RuntimeError), elastic.store_timeout(store, 0.05):
            store.get("never")

        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]


Synchronize = Callable[..., list[bytes]]


class TestSynchronize:
    """All ranks exchange data, with tracedstore's function or torch's."""

    @pytest.mark.parametrize(
        "functions",
        [
            [tracedstore.synchronize] * 3,
            [torch_store.synchronize, tracedstore.synchronize, torch_store.synchronize],
            [tracedstore.synchronize, torch_store.synchronize, torch_store.synchronize],
        ],
        ids=["tracedstore", "torch rank 0", "tracedstore rank 0"],
    )
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_mixed_ranks(self, functions: list[Synchronize], wrapped: bool) -> None:
        """Ranks of both kinds work together; rank 0 waits for the others."""
        tracedstore.configure(log_format="off")
        store: Any = tracedstore.wrap(HashStore()) if wrapped else HashStore()

        def run(rank: int) -> list[bytes]:
            return functions[rank](
                store, b"%d" % rank, rank, len(functions), "data", 20
            )

        with ThreadPoolExecutor(len(functions)) as ranks:
            results = list(ranks.map(run, range(len(functions))))

        assert results == [[b"0", b"1", b"2"]] * 3

    def test_missing_rank(self) -> None:
        """The store's timeout error is raised, and its timeout is restored."""
        store = HashStore()
        store.set_timeout(timedelta(seconds=9))

        with pytest.raises(RuntimeError, match="Wait timeout"):
            tracedstore.synchronize(store, b"0", 0, 2, "data", 0.05)

        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]
