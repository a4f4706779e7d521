"""get_all, synchronize and store_timeout, together with torch's own."""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.utils import store as torchs

import tracedstore
from tracedstore.coordination import exchange


class TestSignatures:
    """They can stand where torch's stand."""

    @pytest.mark.parametrize("name", ["store_timeout", "get_all", "synchronize"])
    def test_same_parameters(self, name: str) -> None:
        """By name, by position, and with the same defaults."""

        def parameters(module: Any) -> list[tuple[str, Any]]:
            found = inspect.signature(getattr(module, name)).parameters.values()
            return [(parameter.name, parameter.default) for parameter in found]

        assert parameters(tracedstore) == parameters(torchs)


class TestStoreTimeout:
    """The timeout is what it was, however it ended."""

    def test_restored(self) -> None:
        """After success, and after failure, where torch's own forgets it."""
        store = HashStore()
        store.set_timeout(timedelta(seconds=9))
        with exchange.store_timeout(store, 0.05):
            assert store.timeout == timedelta(milliseconds=50)  # type: ignore[attr-defined]
        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]

        with pytest.raises(RuntimeError), exchange.store_timeout(store, 0.05):
            store.get("never")

        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]


Synchronize = Callable[..., list[bytes]]


class TestSynchronize:
    """Everybody's data reaches everybody, whoever wrote the code."""

    @pytest.mark.parametrize(
        "fleet",
        [
            [tracedstore.synchronize] * 3,
            [torchs.synchronize, tracedstore.synchronize, torchs.synchronize],
            [tracedstore.synchronize, torchs.synchronize, torchs.synchronize],
        ],
        ids=["ours", "torch first", "ours first"],
    )
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_mixed_fleets(self, fleet: list[Synchronize], wrapped: bool) -> None:
        """Ranks of both kinds meet, rank 0 of either kind waits for the others."""
        tracedstore.configure(log_format="off")
        store: Any = tracedstore.wrap(HashStore()) if wrapped else HashStore()

        def take_part(rank: int) -> list[bytes]:
            return fleet[rank](store, b"%d" % rank, rank, len(fleet), "data", 20)

        with ThreadPoolExecutor(len(fleet)) as ranks:
            results = list(ranks.map(take_part, range(len(fleet))))

        assert results == [[b"0", b"1", b"2"]] * 3

    def test_one_never_comes(self) -> None:
        """The store's own timeout comes through, and its timeout is as before."""
        store = HashStore()
        store.set_timeout(timedelta(seconds=9))

        with pytest.raises(RuntimeError, match="Wait timeout"):
            tracedstore.synchronize(store, b"0", 0, 2, "data", 0.05)

        assert store.timeout == timedelta(seconds=9)  # type: ignore[attr-defined]
