"""Counts of this process's barriers, and the barriers that are stalled now.

A barrier call takes no lock here: a signal handler may interrupt it, and use a barrier
itself.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tracedstore.common.keys import KeyFamilies, key_text
from tracedstore.recording.counters import BOUNDS

# Calls that ended and are not counted yet, at most.
_MAX_UNCOUNTED = 256

Result = Literal["completed", "timeout", "failed"]
RESULTS: tuple[Result, ...] = ("completed", "timeout", "failed")


@dataclass(slots=True)
class Durations:
    """A histogram over `BOUNDS`."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Count one duration."""
        self.buckets[bisect_left(BOUNDS, nanoseconds)] += 1
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


class Ending(Protocol):
    """A barrier call.

    Attributes:
        ended: The call has ended.
    """

    ended: bool


class BarrierStats:
    """Counts barrier calls, and keeps the stalled ones.

    A call that ended is counted when the counts are read: other work waits for it.

    Attributes:
        families: The families of key prefixes. The keys of Store calls have others, so
            that a program with many of them leaves room for its barriers.
    """

    def __init__(self) -> None:
        self.families = KeyFamilies()
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self.families.reset()
        self._lock = threading.Lock()
        self._durations: defaultdict[tuple[str, Result], Durations] = defaultdict(
            Durations
        )
        self._last_arrivals: Counter[str] = Counter()
        # The key prefix, result, duration and whether this process arrived last.
        self._uncounted: deque[tuple[str, Result, int, bool]] = deque()
        # The stalled calls, by their identity.
        self._stalled: dict[int, tuple[Ending, StalledBarrier]] = {}

    def record_stall(self, call: Ending, stalled: StalledBarrier) -> bool:
        """Keep a barrier as stalled; return False if its call has ended.

        The watcher reads the missing ranks in its own thread. The barrier may complete
        meanwhile, and its gauges must not stay set then.
        """
        with self._lock:
            self._forget_ended()
            if not call.ended:
                self._stalled[id(call)] = call, stalled
            return not call.ended

    def end(self, prefix: str, result: Result, nanoseconds: int, last: bool) -> None:
        """Count a barrier call that ended.

        Args:
            prefix: The key prefix of the barrier.
            result: How it ended.
            nanoseconds: Its duration.
            last: This process arrived last.
        """
        # Atomic, so without the lock.
        self._uncounted.append((prefix, result, nanoseconds, last))
        # Not waited for: this thread may hold it, in what a signal handler interrupted.
        if len(self._uncounted) >= _MAX_UNCOUNTED and self._lock.acquire(False):
            try:
                self._count()
            finally:
                self._lock.release()

    def _forget_ended(self) -> None:
        for call, _ in list(self._stalled.values()):
            if call.ended:
                del self._stalled[id(call)]

    def _count(self) -> None:
        while self._uncounted:
            prefix, result, nanoseconds, last = self._uncounted.popleft()
            family = self.families.of(key_text(prefix))
            self._durations[family, result].add(nanoseconds)
            if last:
                self._last_arrivals[family] += 1

    def durations(self) -> dict[tuple[str, Result], Durations]:
        """Return the histograms; a family that has one has one for every result."""
        with self._lock:
            self._count()
            for family in {family for family, _ in self._durations}:
                for result in RESULTS:
                    self._durations[family, result]
            return {labels: each.copy() for labels, each in self._durations.items()}

    def last_arrivals(self) -> dict[str, int]:
        """Return how often this process arrived last, by family."""
        with self._lock:
            self._count()
            families = {family for family, _ in self._durations}
            return {family: self._last_arrivals[family] for family in families}

    def stalled(self) -> list[StalledBarrier]:
        """Return the barriers that are stalled now."""
        with self._lock:
            self._forget_ended()
            return [stalled for _, stalled in self._stalled.values()]
