"""The clock that recording reads, replaceable in tests."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock and the time of day.

    Attributes:
        ticks: A monotonic time in nanoseconds; durations are differences of it.
        wall: The time of day in nanoseconds since the epoch. It may jump, so it only
            dates what ``ticks`` measured.
    """

    ticks: Callable[[], int] = time.perf_counter_ns
    wall: Callable[[], int] = time.time_ns

    def wall_of(self, ticks: int) -> int:
        """Return the time of day of an earlier reading of ``ticks``."""
        return self.wall() - (self.ticks() - ticks)


SYSTEM_CLOCK = Clock()
