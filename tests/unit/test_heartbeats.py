"""Clock skew and silence of nodes, from the heartbeats that one process reads."""

import pytest

from tracedstore.rendezvous import heartbeats as module
from tracedstore.rendezvous.heartbeats import Heartbeats


class Clock:
    """The clock of the process that reads."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        """Return the time, also as the monotonic one."""
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the test moves."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def read_often(clock: Clock, skew: float) -> Heartbeats[str]:
    """Read once a second while node b sends a heartbeat every five seconds."""
    seen: Heartbeats[str] = Heartbeats()
    for second in range(20):
        written = clock.now - second % 5
        seen.record({"a": written, "b": written + skew}, clock.now)
        clock.now += 1.0
    return seen


class TestSkew:
    """The clock of another node differs."""

    @pytest.mark.parametrize("skew", [-3600.0, -60.0, -7.0, 7.0, 60.0, 3600.0])
    def test_is_found(self, clock: Clock, skew: float) -> None:
        """The reported skew is a lower bound, less exact by the interval of reads."""
        found = read_often(clock, skew).skew_seconds("b")

        assert found is not None
        assert found == pytest.approx(skew, abs=1.5)
        assert abs(found) <= abs(skew)

    @pytest.mark.parametrize("skew", [-4.0, -1.0, 0.0, 1.0, 4.0])
    def test_small(self, clock: Clock, skew: float) -> None:
        """Less than five seconds is not reported."""
        assert read_often(clock, skew).skew_seconds("b") is None

    def test_one_late_write(self, clock: Clock) -> None:
        """A process that stopped once before it wrote is not taken for a late clock."""
        seen: Heartbeats[str] = Heartbeats()
        for age in (0.0, 0.0, 60.0, 0.0):
            seen.record({"b": clock.now - age}, clock.now)
            clock.now += 5.0
            assert seen.skew_seconds("b") is None

    def test_slow_store(self, clock: Clock) -> None:
        """Writes that take long on all nodes are not taken for late clocks."""
        seen: Heartbeats[str] = Heartbeats()
        for _ in range(4):
            started = clock.now
            clock.now += 8.0
            seen.record({"b": started - 8.0}, started)

        assert seen.skew_seconds("b") is None

    def test_rare_reads(self, clock: Clock) -> None:
        """Heartbeats between two distant reads may be of any time between them."""
        seen: Heartbeats[str] = Heartbeats()
        for _ in range(4):
            seen.record({"b": clock.now - 55.0}, clock.now)
            clock.now += 60.0

        assert seen.skew_seconds("b") is None

    def test_unknown_and_first_seen(self, clock: Clock) -> None:
        """The age of a node's first heartbeat says nothing."""
        seen: Heartbeats[str] = Heartbeats()
        seen.record({"b": clock.now - 600}, clock.now)

        assert seen.skew_seconds("b") is None
        assert seen.skew_seconds("unknown") is None


class TestSilence:
    """The time since the last heartbeat."""

    def test_is_corrected_by_the_skew(self, clock: Clock) -> None:
        """A node with another time is not silent."""
        for skew in (-60.0, 60.0):
            silent = read_often(clock, skew).silent_seconds("b", clock.now)
            assert silent is not None
            assert silent < 7

    def test_without_a_heartbeat(self) -> None:
        """It is not known."""
        assert Heartbeats[str]().silent_seconds("b", 0.0) is None

    def test_unchanged(self, clock: Clock) -> None:
        """A node that was seen for a while without a new heartbeat is unchanged."""
        seen: Heartbeats[str] = Heartbeats()
        for second in range(12):
            seen.record({"old": 5.0, "b": clock.now - second % 5}, clock.now)
            clock.now += 1.0

        assert seen.is_unchanged("old", 10)
        assert not seen.is_unchanged("old", 11)
        assert not seen.is_unchanged("b", 10)
        assert not seen.is_unchanged("unknown", 0)

    def test_kept(self, clock: Clock) -> None:
        """The other nodes are forgotten."""
        seen: Heartbeats[str] = Heartbeats()
        seen.record({"a": 1.0, "b": 1.0}, clock.now)
        seen.keep(["a"])

        assert seen.silent_seconds("b", 2.0) is None
        assert seen.silent_seconds("a", 2.0) == 1.0
