"""Queries all ranks for their status, in bounded time.

torch's pages read the addresses of all ranks with one ``multi_get``. It blocks until
the last rank has registered, or for the store's 300 s. Here nothing blocks the page:
separate threads use the store and the network, and at its timeout the page shows what
they have received.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracedstore.common.timeouts import start_bounded_thread
from tracedstore.coordination.arrivals import find_absent
from tracedstore.coordination.connections import close_connection
from tracedstore.coordination.rank_registry import RankInfo, read_ranks
from tracedstore.export.inflight_client import Reply, fetch, request_each

# Seconds for one rank to answer, and for the store to return the addresses.
_RANK_TIMEOUT = 2.0
_STORE_TIMEOUT = 2.0

_KEYS_CHANGED = (
    "torch's debug server does not register under the keys of torch 2.13, so a rank"
    " that runs it without this page is shown as never registered"
)


@dataclass(frozen=True, slots=True)
class _RegisteredRanks:
    """The registered ranks: with this page, and only with torch's debug server."""

    with_page: Mapping[int, RankInfo] = field(default_factory=dict)
    without_page: frozenset[int] = frozenset()


class Directory:
    """The addresses of the ranks, as last read from the store.

    If the store does not answer, the addresses read before remain. Only one thread at
    a time reads the store, however often the page is requested.
    """

    def __init__(self, connect: Callable[[], Any], world_size: int) -> None:
        self._connect = connect
        self._ranks = range(world_size)
        self._lock = threading.Lock()
        self._read_done: threading.Event | None = None
        self._registered = _RegisteredRanks()
        self._store_error = ""

    def read(self, timeout: float) -> tuple[_RegisteredRanks, str]:
        """Return the registered ranks, and the error of the store or ""."""
        with self._lock:
            if self._read_done is None:
                # Joined at exit, because it is in a Store call.
                try:
                    start_bounded_thread(self._run)
                except RuntimeError as error:
                    return self._registered, f"the store was not read: {error}"
                self._read_done = threading.Event()
            read_done = self._read_done
        if not read_done.wait(timeout):
            return self._registered, f"the store did not answer within {timeout:.0f} s"
        return self._registered, self._store_error

    def _run(self) -> None:
        try:
            store = self._connect()
            try:
                self._registered = self._read_registered(store)
                # torch's rank 0 registers before it starts the process this runs in.
                self._store_error = "" if store.check(["rank0"]) else _KEYS_CHANGED
            finally:
                close_connection(store)
        except Exception as error:
            self._store_error = f"the store could not be read: {error!r:.200}"
        finally:
            with self._lock:
                if self._read_done is not None:
                    self._read_done.set()
                self._read_done = None

    def _read_registered(self, store: Any) -> _RegisteredRanks:
        with_page = read_ranks(store, self._ranks)
        others = [rank for rank in self._ranks if rank not in with_page]
        absent = find_absent(
            lambda some: bool(store.check([f"rank{rank}" for rank in some])), others
        )
        return _RegisteredRanks(with_page, frozenset(others) - frozenset(absent))


def query_ranks(
    directory: Directory, world_size: int, timeout: float
) -> tuple[dict[int, Reply], str]:
    """Query all ranks; return a reply for each, and the error of the store or ""."""
    deadline = time.monotonic() + timeout
    registered, store_error = directory.read(min(_STORE_TIMEOUT, timeout / 2))
    remaining = deadline - time.monotonic()
    answers = request_each(
        registered.with_page.values(), _fetch_status, _RANK_TIMEOUT, remaining
    )
    replies = {info.rank: reply for info, reply in answers.items()}
    return {
        rank: replies.get(rank) or _unanswered(registered, rank)
        for rank in range(world_size)
    }, store_error


def _unanswered(registered: _RegisteredRanks, rank: int) -> Reply:
    info = registered.with_page.get(rank)
    if info is not None:
        return Reply(state="silent", info=info, error="no answer in time")
    return Reply(state="without" if rank in registered.without_page else "absent")


async def _fetch_status(info: RankInfo) -> bytes:
    host, _, port = str(info.answers).rpartition(":")
    return await fetch(host, int(port))
