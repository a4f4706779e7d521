"""How many ordinary calls may get a span: a rate with a burst."""

import math


class Budget:
    """A token bucket that a call can be tested against with one comparison.

    This is the generic cell rate algorithm: instead of counting tokens it keeps the
    time from which the next call is let through, so the hot path only compares
    ``opens_at`` with the time it has anyway.

    Attributes:
        opens_at: Ticks from which a call is let through.
        counting: Calls that are not let through are to be counted; off while
            there is nobody to give spans to.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1e9 / rate if rate > 0 else math.inf
        # One of the burst is the call being tested itself.
        self._tolerance = max(burst - 1, 0) * self._interval if rate > 0 else 0
        self._due = -math.inf
        self.opens_at = -math.inf if rate > 0 else math.inf
        self.counting = False

    def spend(self, now: int) -> None:
        """Take one call off the budget. Races let a call too many through, no more."""
        self._due = max(self._due, now) + self._interval
        self.opens_at = self._due - self._tolerance

    def pause(self, until: int) -> None:
        """Let nothing through before a time, and count nothing meanwhile."""
        self.opens_at = until
        self.counting = False


class Unlimited(Budget):
    """Every call is let through."""

    def __init__(self) -> None:
        super().__init__(rate=math.inf, burst=1)

    def spend(self, now: int) -> None:
        """Nothing is ever used up."""


def nothing() -> Budget:
    """Let no call through."""
    return Budget(rate=0, burst=0)
