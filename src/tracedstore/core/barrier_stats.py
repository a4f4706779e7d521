"""Counts of this process's barriers, and the barriers that are stalled now.

Barriers are rare and slow next to Store calls, so these counts take a lock.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from tracedstore.core.counters import WAIT_BOUNDS

Result = Literal["completed", "timeout", "failed"]
RESULTS: tuple[Result, ...] = ("completed", "timeout", "failed")


@dataclass(slots=True)
class Durations:
    """A histogram over `WAIT_BOUNDS`."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS) + 1))
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Count one duration."""
        self.buckets[bisect_left(WAIT_BOUNDS, nanoseconds)] += 1
        self.nanoseconds += nanoseconds

    def copy(self) -> "Durations":
        """Return a copy of the counts."""
        return Durations(list(self.buckets), self.nanoseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledBarrier:
    """A barrier that waits, as of the last report.

    Attributes:
        family: The key family of its prefix.
        arrived: Number of ranks that arrived.
        missing: The ranks that did not, each with the name of its host.
        possible: Number of ranks that may be missing, where some arrived without a
            name.
    """

    family: str
    arrived: int
    missing: Mapping[int, str]
    possible: int


class BarrierStats:
    """Counts barrier calls, and keeps the stalled ones."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._lock = threading.Lock()
        self._durations: defaultdict[tuple[str, Result], Durations] = defaultdict(
            Durations
        )
        self._last_arrivals: Counter[str] = Counter()
        # None until the call is reported as stalled.
        self._calls: dict[int, StalledBarrier | None] = {}
        self._ids = count()

    def begin(self) -> int:
        """Note that a barrier call began; return its id."""
        with self._lock:
            call = next(self._ids)
            self._calls[call] = None
            return call

    def record_stall(self, call: int, stalled: StalledBarrier) -> bool:
        """Keep a barrier as stalled; return False if its call has ended.

        The watcher reads the missing ranks in its own thread. The barrier may complete
        meanwhile, and its gauges must not stay set then.
        """
        with self._lock:
            if call not in self._calls:
                return False
            self._calls[call] = stalled
            return True

    def end(self, call: int, family: str, result: Result, nanoseconds: int) -> None:
        """Count a barrier call that ended."""
        with self._lock:
            self._calls.pop(call, None)
            self._durations[family, result].add(nanoseconds)

    def record_last_arrival(self, family: str) -> None:
        """Count that this process arrived last."""
        with self._lock:
            self._last_arrivals[family] += 1

    def durations(self) -> dict[tuple[str, Result], Durations]:
        """Return the histograms; a family that has one has one for every result."""
        with self._lock:
            for family in {family for family, _ in self._durations}:
                for result in RESULTS:
                    self._durations[family, result]
            return {labels: each.copy() for labels, each in self._durations.items()}

    def last_arrivals(self) -> dict[str, int]:
        """Return how often this process arrived last, by family."""
        with self._lock:
            families = {family for family, _ in self._durations}
            return {family: self._last_arrivals[family] for family in families}

    def stalled(self) -> list[StalledBarrier]:
        """Return the barriers that are stalled now."""
        with self._lock:
            return [stalled for stalled in self._calls.values() if stalled is not None]
