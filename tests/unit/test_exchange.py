"""get_all, synchronize and store_timeout, alone and together with torch's."""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from tracedstore import elastic


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
