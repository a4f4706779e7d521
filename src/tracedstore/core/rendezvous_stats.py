"""What the rendezvous of this process did, and how its state was last seen.

A rendezvous is a rare and slow thing next to a Store call, so a lock is taken here.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

from tracedstore.core.barrier_stats import RESULTS, Durations, Result

Write = Literal["accepted", "conflict", "failed"]
WRITES: tuple[Write, ...] = ("accepted", "conflict", "failed")

_MOST_BACKENDS = 16
_OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """The state of a rendezvous, as it was last read or written.

    Attributes:
        participants: How many nodes have joined the round.
        wait_list: How many wait for the next one.
        round: Which round it is.
        complete: The round has all the nodes it takes.
        size: Bytes of the state.
        oldest_heartbeat: When the node that is silent for longest was last heard of,
            in seconds since the epoch; None where none was yet.
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
        """Start anew, as a forked child does."""
        self._lock = threading.Lock()
        self._backends: set[str] = set()
        self._writes: Counter[tuple[str, Write]] = Counter()
        self._durations: defaultdict[tuple[str, Result], Durations] = defaultdict(
            Durations
        )
        self._views: dict[str, RendezvousView] = {}

    def opened(self, backend: str) -> None:
        """Count for a backend from zero on."""
        with self._lock:
            self._known(backend)

    def wrote(self, backend: str, result: Write) -> None:
        """Count a write of the state."""
        with self._lock:
            self._writes[self._known(backend), result] += 1

    def saw(self, backend: str, view: RendezvousView) -> None:
        """Keep how the state was last seen."""
        with self._lock:
            self._views[self._known(backend)] = view

    def ended(self, backend: str, result: Result, nanoseconds: int) -> None:
        """Count a rendezvous that this process took part in."""
        with self._lock:
            self._durations[self._known(backend), result].add(nanoseconds)

    def writes(self) -> dict[tuple[str, Write], int]:
        """Give the counts; every result of a known backend is there."""
        with self._lock:
            return {
                (backend, result): self._writes[backend, result]
                for backend in sorted(self._backends)
                for result in WRITES
            }

    def views(self) -> dict[str, RendezvousView]:
        """Give the last view of each backend that showed one."""
        with self._lock:
            return dict(self._views)

    def durations(self) -> dict[tuple[str, Result], Durations]:
        """Give the histograms; every result of a known backend is there."""
        with self._lock:
            return {
                (backend, result): self._durations[backend, result].copy()
                for backend in sorted(self._backends)
                for result in RESULTS
            }

    def _known(self, backend: str) -> str:
        # A name is a label, and anybody may write a backend.
        if backend not in self._backends:
            if len(self._backends) >= _MOST_BACKENDS:
                backend = _OTHER
            self._backends.add(backend)
        return backend
