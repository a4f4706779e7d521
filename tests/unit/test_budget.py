"""The span budget: a rate limit with a burst."""

from tracedstore.recording.recorder import Budget, Unlimited

_SECOND = 1_000_000_000


def _admitted(budget: Budget, times: list[int]) -> int:
    count = 0
    for now in times:
        if now >= budget.opens_at:
            budget.spend(now)
            count += 1
    return count


class TestBudget:
    """Which calls the budget admits."""

    def test_burst_at_once(self) -> None:
        """At one moment exactly the burst is admitted."""
        assert _admitted(Budget(rate=20, burst=200), [0] * 1000) == 200

    def test_rate_in_the_long_run(self) -> None:
        """A call every millisecond for ten seconds admits the burst and the rate."""
        every_millisecond = list(range(0, 10 * _SECOND, _SECOND // 1000))

        assert abs(_admitted(Budget(20, 200), every_millisecond) - 400) <= 1

    def test_recovers(self) -> None:
        """After a time without calls the whole burst is available again."""
        budget = Budget(rate=20, burst=200)
        _admitted(budget, [0] * 1000)

        assert _admitted(budget, [11 * _SECOND] * 1000) == 200

    def test_pause(self) -> None:
        """A paused budget admits nothing and keeps its burst."""
        budget = Budget(rate=20, burst=200)
        budget.counting = True
        budget.pause(until=_SECOND)

        assert _admitted(budget, [0] * 10) == 0
        assert not budget.counting
        assert _admitted(budget, [_SECOND] * 1000) == 200

    def test_nothing_and_unlimited(self) -> None:
        """A budget without a rate admits no call and Unlimited every call."""
        assert _admitted(Budget(), [0, _SECOND, 10**18]) == 0
        assert _admitted(Unlimited(), [0] * 1000) == 1000
