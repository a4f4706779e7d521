"""The span budget: how many ordinary calls get a span, as a rate with a burst."""

# Integers like ticks: the fast path compares them.
ALWAYS = -(2**63)
NEVER = 2**63


class Budget:
    """A token bucket that costs a call one comparison.

    This is the generic cell rate algorithm. It does not count tokens; it keeps the
    time from which the next call is admitted, so the fast path only compares
    ``opens_at`` with the time that it has read anyway.

    Attributes:
        opens_at: Ticks from which a call is admitted.
        counting: Calls that are not admitted are counted; off while there is no
            tracer provider.
    """

    __slots__ = ("_due", "_interval", "_tolerance", "counting", "opens_at")

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = int(1e9 / rate) if rate > 0 else NEVER
        # The call being tested is one of the burst.
        self._tolerance = (burst - 1) * self._interval
        self._due = ALWAYS
        self.opens_at = ALWAYS if rate > 0 else NEVER
        self.counting = False

    def spend(self, now: int) -> None:
        """Take one call off the budget. A race admits one call too many, no more."""
        self._due = max(self._due, now) + self._interval
        self.opens_at = self._due - self._tolerance

    def pause(self, until: int) -> None:
        """Admit nothing before a time, and count nothing until then."""
        self.opens_at = until
        self.counting = False


class Unlimited(Budget):
    """Admits every call."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(rate=1, burst=1)

    def spend(self, now: int) -> None:
        """Do nothing."""


def budget_of(spans: str, rate: float, burst: int) -> Budget:
    """Return the budget for a setting of ``spans``."""
    if spans == "all":
        return Unlimited()
    if spans == "budget":
        return Budget(rate, burst)
    return nothing()


def nothing() -> Budget:
    """Return a budget that admits no call."""
    return Budget(rate=0, burst=1)
