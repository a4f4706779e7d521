"""Counts the requests inside one call of torch's EtcdStore.

``EtcdStore.add`` repeats its compare-and-set until it wins, and ``get`` and ``wait``
loop over watches, all inside one call. The store makes every request through the client
that it was created with, so a wrapper of that client counts them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import etcd

from tracedstore.etcd.request_counts import AttemptCounter, AttemptCounts
from tracedstore.recording.operation import Attempts

_REQUESTS = frozenset(
    {"delete", "get", "read", "set", "test_and_set", "update", "watch", "write"}
)


def count_requests_of(store: Any) -> "CountingClient":
    """Wrap the client of an EtcdStore in a counting client, unless it is one."""
    if type(store.client) is not CountingClient:
        store.client = CountingClient(store.client)
    client: CountingClient = store.client
    return client


class CountingClient:
    """Behaves like the client that it wraps, and counts its requests."""

    def __init__(self, client: Any) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_counter", AttemptCounter())

    def start(self) -> None:
        """Start to count the requests of this thread."""
        self._counter.start()

    def stop(self) -> Attempts:
        """Stop counting for this thread, and return the counts."""
        attempts: Attempts = self._counter.stop()
        return attempts

    @property  # type: ignore[misc]  # passes isinstance() checks for the client
    def __class__(self) -> type:
        return type(self._client)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        counts = self._counter.current()
        if counts is None or name not in _REQUESTS:
            return attribute
        return _counted(name, attribute, counts)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._client, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._client, name)

    def __contains__(self, key: str) -> bool:
        return key in self._client

    def __repr__(self) -> str:
        return repr(self._client)


def _counted(
    name: str, request: Callable[..., Any], counts: AttemptCounts
) -> Callable[..., Any]:
    is_swap = name == "test_and_set"

    @wraps(request)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.requests += 1
        try:
            result = request(*args, **kwargs)
        except etcd.EtcdCompareFailed:
            counts.swaps_lost += is_swap
            raise
        except etcd.EtcdWatchTimedOut:
            counts.watch_timeouts += 1
            raise
        counts.swaps_won += is_swap
        return result

    return counted
