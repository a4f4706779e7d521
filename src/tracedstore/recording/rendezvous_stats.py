"""Counts of this process's rendezvous, and their state as last read or written.

Rendezvous are rare and slow next to Store calls, so these counts take a lock.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

from tracedstore.recording.barrier_stats import RESULTS, Durations, Result

Write = Literal["accepted", "conflict", "failed"]
WRITES: tuple[Write, ...] = ("accepted", "conflict", "failed")

_MAX_BACKENDS = 16
_OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """The state of a rendezvous, as it was last read or written.

    Attributes:
        participants: Number of nodes that joined the round.
        wait_list: Number of nodes that wait for the next round.
        round: The number of the round.
        complete: The round has all its nodes.
        size: Bytes of the state.
        oldest_heartbeat: The oldest of the nodes' last heartbeats, in seconds since
            the epoch; None without a heartbeat.
    """

    participants: int
    wait_list: int
    round: int
    complete: bool
    size: int
    oldest_heartbeat: float | None


class RendezvousStats:
    """Counts writes and rounds, and keeps the last view, by the backend's name."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._lock = threading.RLock()
        self._backends: set[str] = set()
        self._writes: Counter[tuple[str, Write]] = Counter()
        self._durations: defaultdict[tuple[str, Result], Durations] = defaultdict(
            Durations
        )
        self._views: dict[str, RendezvousView] = {}

    def open(self, backend: str) -> None:
        """Export the counts of a backend, from zero."""
        with self._lock:
            self._known(backend)

    def record_write(self, backend: str, result: Write) -> None:
        """Count a write of the state."""
        with self._lock:
            self._writes[self._known(backend), result] += 1

    def record_view(self, backend: str, view: RendezvousView) -> None:
        """Keep the state as last read or written."""
        with self._lock:
            self._views[self._known(backend)] = view

    def end(self, backend: str, result: Result, nanoseconds: int) -> None:
        """Count a round that this process joined, or failed to join."""
        with self._lock:
            self._durations[self._known(backend), result].add(nanoseconds)

    def writes(self) -> dict[tuple[str, Write], int]:
        """Return the counts; a backend has one for every result."""
        with self._lock:
            return {
                (backend, result): self._writes[backend, result]
                for backend in sorted(self._backends)
                for result in WRITES
            }

    def views(self) -> dict[str, RendezvousView]:
        """Return the last view of each backend that has one."""
        with self._lock:
            return dict(self._views)

    def durations(self) -> dict[tuple[str, Result], Durations]:
        """Return the histograms; a backend has one for every result."""
        with self._lock:
            return {
                (backend, result): self._durations[backend, result].copy()
                for backend in sorted(self._backends)
                for result in RESULTS
            }

    def _known(self, backend: str) -> str:
        # The name becomes a label, and users write backends of their own.
        if backend not in self._backends:
            if len(self._backends) >= _MAX_BACKENDS:
                backend = _OTHER
            self._backends.add(backend)
        return backend
