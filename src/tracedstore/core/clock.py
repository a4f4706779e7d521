"""Time, as something that can be handed in."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the recording takes its time from.

    Attributes:
        ticks: A monotonic time in nanoseconds; durations are differences of it.
        wall: The time of day in nanoseconds since the epoch; it may jump, so it
            only ever dates what ``ticks`` measured.
    """

    ticks: Callable[[], int] = time.perf_counter_ns
    wall: Callable[[], int] = time.time_ns

    def wall_of(self, ticks: int) -> int:
        """Date an earlier reading of ``ticks``."""
        return self.wall() - (self.ticks() - ticks)


SYSTEM_CLOCK = Clock()
