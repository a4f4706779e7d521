"""Counts the requests inside one Store call, by the thread that makes it.

An EtcdV3Store counts its own. In torch's EtcdStore ``add`` repeats its compare-and-set
until it wins, and ``get`` and ``wait`` loop over watches, all inside one call. That
store makes every request through the client that it was created with, so a wrapper of
the client counts them.
"""

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any

from tracedstore import names
from tracedstore.recording.cold_metrics import Recovery, RequestResult
from tracedstore.recording.operation import Attempts, EtcdRequest
from tracedstore.recording.recorder import RECORDER

# The methods of python-etcd's client that make a request.
_REQUESTS = frozenset(
    {"delete", "get", "read", "set", "test_and_set", "update", "watch", "write"}
)
# Requests of one call that its span shows.
_MAX_REQUESTS_SHOWN = 16


class AttemptCounter:
    """Counts what a thread does between `start` and `stop`.

    What a thread does without a traced call is not counted: a rendezvous backend may
    share the client.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Attempts] = {}

    def start(self) -> None:
        """Start to count for this thread."""
        self._counts[get_ident()] = Attempts()

    def stop(self) -> Attempts:
        """Stop counting for this thread, and return the counts."""
        return self._counts.pop(get_ident())

    def current(self) -> Attempts | None:
        """Return the counts of this thread's call; None without one."""
        return self._counts.get(get_ident())


class Traffic(AttemptCounter):
    """The requests of a client: the `Probe` of a store, and the process's metrics."""

    def add_request(
        self,
        method: str,
        server: str,
        result: RequestResult,
        started: int,
        *,
        sent: int,
        received: int = 0,
    ) -> None:
        """Count a request that has ended.

        Args:
            method: The method, for example ``kv/range``.
            server: The member that it was sent to.
            result: What became of it.
            started: When it was sent, in ticks.
            sent: Bytes of the request.
            received: Bytes of the answer.
        """
        name = method.rpartition("/")[2]
        if RECORDER.on:
            RECORDER.cold.record(
                (names.ETCD_REQUESTS_MADE, (name, result), 1),
                (names.ETCD_BYTES, ("sent",), sent),
                (names.ETCD_BYTES, ("received",), received),
                # All kinds of them exist from the first request on.
                (names.ETCD_RECOVERIES_MADE, ("retry",), None),
            )
        counts = self.current()
        if counts is None:
            return
        counts.requests += 1
        if len(counts.shown) < _MAX_REQUESTS_SHOWN:
            duration = RECORDER.ticks() - started
            request = EtcdRequest(
                name, server, result, RECORDER.clock.wall_of(started), duration
            )
            counts.shown += (request,)

    def add_recovery(self, kind: Recovery) -> None:
        """Count a step that a failure made necessary."""
        if RECORDER.on:
            RECORDER.cold.record((names.ETCD_RECOVERIES_MADE, (kind,), 1))
        counts = self.current()
        if counts is not None:
            counts.recoveries += 1

    def add_swap(self, *, won: bool) -> None:
        """Count a compare-and-set that the store makes by itself."""
        counts = self.current()
        if counts is not None:
            counts.swaps_won += won
            counts.swaps_lost += not won

    def add_watch_timeout(self) -> None:
        """Count a watch that ended without a change."""
        counts = self.current()
        if counts is not None:
            counts.watch_timeouts += 1


def count_requests_of(store: Any) -> AttemptCounter:
    """Count the requests of an EtcdStore from now on, by a wrapper of its client."""
    if type(store.client) is not CountingClient:
        store.client = CountingClient(store.client)
    counter: AttemptCounter = store.client._counter  # noqa: SLF001 - of this module
    return counter


class CountingClient:
    """Behaves like the client that it wraps, and counts its requests."""

    def __init__(self, client: Any) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_counter", AttemptCounter())

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
    name: str, request: Callable[..., Any], counts: Attempts
) -> Callable[..., Any]:
    import etcd  # noqa: PLC0415 - EtcdV3Store does not need it

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
