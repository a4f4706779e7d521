"""How many ordinary calls may get a span: a rate with a burst."""

# Ticks are integers; so are these, because the hot path compares them.
ALWAYS = -(2**63)
NEVER = 2**63


class Budget:
    """A token bucket that a call can be tested against with one comparison.

    This is the generic counts rate algorithm: instead of counting tokens it keeps the
    time from which the next call is let through, so the hot path only compares
    ``opens_at`` with the time it has anyway.

    Attributes:
        opens_at: Ticks from which a call is let through.
        counting: Calls that are not let through are to be counted; off while
            there is nobody to give spans to.
    """

    __slots__ = ("_due", "_interval", "_tolerance", "counting", "opens_at")

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = int(1e9 / rate) if rate > 0 else NEVER
        # One of the burst is the call being tested itself.
        self._tolerance = (burst - 1) * self._interval
        self._due = ALWAYS
        self.opens_at = ALWAYS if rate > 0 else NEVER
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

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(rate=1, burst=1)

    def spend(self, now: int) -> None:
        """Nothing is ever used up."""


def nothing() -> Budget:
    """Let no call through."""
    return Budget(rate=0, burst=1)
