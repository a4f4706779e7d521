"""Clock skew and silence of nodes, from the heartbeats that one process reads."""

import pytest

from tracedstore.rendezvous import state as module
from tracedstore.rendezvous.state import Heartbeats, Node

A, B = (Node(host, 1, 0) for host in "ab")


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


def read_often(clock: Clock, skew: float) -> Heartbeats:
    """Read once a second while both nodes send a heartbeat every five seconds.

    Node a is the one that reads.
    """
    seen = Heartbeats()
    heartbeats = {}
    for second in range(20):
        if second % 5 == 0:
            heartbeats[A] = clock.now
            seen.record(dict(heartbeats), wrote=clock.now)
        if second % 5 == 2:
            heartbeats[B] = clock.now + skew
        seen.record(dict(heartbeats))
        clock.now += 1.0
    return seen


class TestSkew:
    """The clock of another node differs."""

    @pytest.mark.parametrize("skew", [-3600.0, -60.0, -7.0, 7.0, 60.0, 3600.0])
    def test_is_found(self, clock: Clock, skew: float) -> None:
        """The reported skew is a lower bound, less exact by the interval of writes."""
        found = read_often(clock, skew).skew_seconds(B)

        assert found is not None
        assert found == pytest.approx(skew, abs=5)
        assert abs(found) <= abs(skew)

    @pytest.mark.parametrize("skew", [-4.0, -1.0, 0.0, 1.0, 4.0])
    def test_small(self, clock: Clock, skew: float) -> None:
        """Less than five seconds is not reported."""
        assert read_often(clock, skew).skew_seconds(B) is None

    def test_first_heartbeat(self, clock: Clock) -> None:
        """One heartbeat of a node that joins after this one is enough."""
        seen = Heartbeats()
        seen.record({A: clock.now}, wrote=clock.now)
        clock.now += 2.0
        seen.record({A: clock.now - 2.0, B: clock.now - 61.0})

        assert seen.skew_seconds(B) == -59.0

    def test_heartbeat_of_the_future(self, clock: Clock) -> None:
        """A node that was there before, and has a time that is still to come."""
        seen = Heartbeats()
        seen.record({B: clock.now + 60.0})

        assert seen.skew_seconds(B) == 60.0

    def test_late_write(self, clock: Clock) -> None:
        """A process that stopped before it wrote is not taken for a late clock.

        Its write succeeds only if this process has not written in the meantime.
        """
        seen = Heartbeats()
        seen.record({A: clock.now, B: clock.now}, wrote=clock.now)
        clock.now += 600.0
        seen.record({A: clock.now - 600.0, B: clock.now - 599.0})

        assert seen.skew_seconds(B) is None

    def test_first_seen(self, clock: Clock) -> None:
        """The age of a heartbeat that was there before says nothing."""
        seen = Heartbeats()
        seen.record({B: clock.now - 600})
        seen.record({A: clock.now, B: clock.now - 600}, wrote=clock.now)
        clock.now += 1.0
        seen.record({A: clock.now - 1.0, B: clock.now - 601})

        assert seen.skew_seconds(B) is None
        assert seen.skew_seconds(Node("unknown", 1, 0)) is None

    def test_forgotten(self, clock: Clock) -> None:
        """A node that was forgotten and is seen again is not new."""
        seen = Heartbeats()
        seen.record({A: clock.now, B: clock.now}, wrote=clock.now)
        seen.keep([A])
        clock.now += 60.0
        seen.record({A: clock.now, B: clock.now - 60.0}, wrote=clock.now)

        assert seen.skew_seconds(B) is None


class TestSilence:
    """The time since the last heartbeat."""

    def test_is_corrected_by_the_skew(self, clock: Clock) -> None:
        """A node with another time is not silent."""
        for skew in (-60.0, 60.0):
            silent = read_often(clock, skew).silent_seconds(B, clock.now)
            assert silent is not None
            assert silent < 7

    def test_without_a_heartbeat(self) -> None:
        """It is not known."""
        assert Heartbeats().silent_seconds(B, 0.0) is None

    def test_unchanged(self, clock: Clock) -> None:
        """A node that was seen for a while without a new heartbeat is unchanged."""
        seen = Heartbeats()
        for second in range(12):
            seen.record({A: 5.0, B: clock.now - second % 5})
            clock.now += 1.0

        assert seen.is_unchanged(A, 10)
        assert not seen.is_unchanged(A, 11)
        assert not seen.is_unchanged(B, 10)
        assert not seen.is_unchanged(Node("unknown", 1, 0), 0)

    def test_kept(self, clock: Clock) -> None:
        """The other nodes are forgotten."""
        seen = Heartbeats()
        seen.record({A: 1.0, B: 1.0})
        seen.keep([A])

        assert seen.silent_seconds(B, 2.0) is None
        assert seen.silent_seconds(A, 2.0) == 1.0
