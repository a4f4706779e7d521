"""What the barriers of this process did, and which of them wait now.

A barrier is a rare and slow thing next to a Store call, so a lock is taken here.
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
        """Count one that took so long."""
        self.buckets[bisect_left(WAIT_BOUNDS, nanoseconds)] += 1
        self.nanoseconds += nanoseconds

    def copy(self) -> "Durations":
        """Give what was counted so far."""
        return Durations(list(self.buckets), self.nanoseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A barrier that waits, as it was found when somebody last looked.

    Attributes:
        family: The family of its key prefix.
        arrived: How many arrived.
        missing: The ranks that did not, each with the name of its host.
        possible: How many may be missing, where some arrived without a name.
    """

    family: str
    arrived: int
    missing: Mapping[int, str]
    possible: int


class BarrierStats:
    """Counts barriers that ended, and knows those that do not."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew, as a forked child does."""
        self._lock = threading.Lock()
        self._durations: defaultdict[tuple[str, Result], Durations] = defaultdict(
            Durations
        )
        self._last: Counter[str] = Counter()
        self._stalled: dict[int, Stalled] = {}
        self._tokens = count()

    def ended(self, family: str, result: Result, nanoseconds: int) -> None:
        """Count a barrier that ended."""
        with self._lock:
            self._durations[family, result].add(nanoseconds)

    def record_last_arrival(self, family: str) -> None:
        """Count that this process was the one the others waited for."""
        with self._lock:
            self._last[family] += 1

    def token(self) -> int:
        """Name one visit of one barrier."""
        return next(self._tokens)

    def stalled(self, token: int, found: Stalled) -> None:
        """Show a barrier as stalled, as it was just found."""
        with self._lock:
            self._stalled[token] = found

    def released(self, token: int) -> None:
        """Show it no longer."""
        with self._lock:
            self._stalled.pop(token, None)

    def durations(self) -> dict[tuple[str, Result], Durations]:
        """Give the histograms; every result of a family that has one is there."""
        with self._lock:
            for family in {family for family, _ in self._durations}:
                for result in RESULTS:
                    self._durations[family, result]
            return {labels: found.copy() for labels, found in self._durations.items()}

    def last_arrivals(self) -> dict[str, int]:
        """Give how often this process came last, by family."""
        with self._lock:
            families = {family for family, _ in self._durations}
            return {family: self._last[family] for family in families}

    def stalled_barriers(self) -> list[Stalled]:
        """List the barriers that are stalled now."""
        with self._lock:
            return list(self._stalled.values())
