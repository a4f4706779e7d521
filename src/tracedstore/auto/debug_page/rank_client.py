"""Ask all ranks what they are doing, in bounded time, whoever is there.

torch's own pages read the addresses of all ranks with one ``multi_get``, which blocks
until the last rank has registered, or for the store's 300 s. Here nothing blocks the
page: what touches the store or the network is done in threads of its own, and the
page takes what has come when its time is up.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracedstore.coordination.arrivals import bisect, close_connection
from tracedstore.coordination.rank_registry import RankInfo, registered
from tracedstore.export.inflight_client import Reply, ask_each, fetch

# Seconds that one rank has to answer, and the store to say where the ranks are.
_ANSWER_WITHIN = 2.0
_STORE_WITHIN = 2.0

_KEYS_CHANGED = (
    "torch's debug server keeps its addresses elsewhere than torch 2.13 does, so a rank"
    " that runs it without this page is shown as one that never registered"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """The ranks that registered with us, and those with torch's server only."""

    ours: Mapping[int, RankInfo] = field(default_factory=dict)
    torchs: frozenset[int] = frozenset()


class Directory:
    """Where the ranks are, as far as the store has said.

    The store may not answer: then the page shows what was known before. One thread
    at a time asks it, however often the page is called for.
    """

    def __init__(self, connect: Callable[[], Any], world_size: int) -> None:
        self._connect = connect
        self._ranks = range(world_size)
        self._lock = threading.Lock()
        self._under_way: threading.Event | None = None
        self._known = _Known()
        self._trouble = ""

    def look(self, within: float) -> tuple[_Known, str]:
        """Give what is known, and what is wrong with the store, if anything is."""
        with self._lock:
            if self._under_way is None:
                self._under_way = threading.Event()
                threading.Thread(target=self._read, daemon=True).start()
            under_way = self._under_way
        if not under_way.wait(within):
            return self._known, f"the store has not answered for {within:.0f} s"
        return self._known, self._trouble

    def _read(self) -> None:
        try:
            store = self._connect()
            try:
                self._known = self._registered(store)
                # This runs in what torch's rank 0 started after it had registered.
                self._trouble = "" if store.check(["rank0"]) else _KEYS_CHANGED
            finally:
                close_connection(store)
        except Exception as error:
            self._trouble = f"the store could not be read: {error!r:.200}"
        finally:
            with self._lock:
                if self._under_way is not None:
                    self._under_way.set()
                self._under_way = None

    def _registered(self, store: Any) -> _Known:
        ours = registered(store, self._ranks)
        rest = [rank for rank in self._ranks if rank not in ours]
        nowhere = bisect(
            lambda some: bool(store.check([f"rank{rank}" for rank in some])), rest
        )
        return _Known(ours, frozenset(rest) - frozenset(nowhere))


def ask_all(
    directory: Directory, world_size: int, within: float
) -> tuple[dict[int, Reply], str]:
    """Ask all ranks; gives a reply for each, and what is wrong with the store."""
    deadline = time.monotonic() + within
    known, trouble = directory.look(min(_STORE_WITHIN, within / 2))
    left = deadline - time.monotonic()
    asked = ask_each(known.ours.values(), _where_it_answers, _ANSWER_WITHIN, left)
    came = {info.rank: reply for info, reply in asked.items()}
    return {
        rank: came.get(rank) or _without_answer(known, rank)
        for rank in range(world_size)
    }, trouble


def _without_answer(known: _Known, rank: int) -> Reply:
    if rank in known.ours:
        return Reply(state="silent", info=known.ours[rank], why="no time was left")
    return Reply(state="without" if rank in known.torchs else "absent")


async def _where_it_answers(info: RankInfo) -> bytes:
    host, _, port = str(info.answers).rpartition(":")
    return await fetch(host, int(port))
