"""The state of a rendezvous, its nodes, and the clocks of their heartbeats."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from support.hostile_pickles import OPCODES, hostile_pickles
from support.rendezvous import pickled_state
from tracedstore.rendezvous import state as module
from tracedstore.rendezvous.state import (
    Attendance,
    Heartbeats,
    Node,
    RendezvousState,
    parse_state,
)

HOSTILE = hostile_pickles()


def make_state(
    *joined: str, waiting: tuple[str, ...] = (), **fields: Any
) -> RendezvousState:
    """Return a state with these nodes, whose heartbeats are recent."""
    state = pickled_state(dict.fromkeys(joined, 0), dict.fromkeys(waiting, 0), **fields)
    parsed = parse_state(state)
    assert parsed is not None
    return parsed


class TestParse:
    """From bytes to a RendezvousState."""

    @pytest.mark.parametrize("protocol", [3, 4, 5])
    def test_torch_state(self, protocol: int) -> None:
        """Pickles of the past, present and next default protocol are parsed."""
        state = dynamic._RendezvousState()
        node, other = dynamic._NodeDesc("a", 1, 0), dynamic._NodeDesc("b", 2, 3)
        state.round, state.complete, state.closed = 4, True, True
        state.deadline = datetime.now(UTC)
        state.participants[node] = 0
        state.wait_list.add(other)
        state.redundancy_list.add(other)
        state.last_heartbeats[node] = datetime.fromtimestamp(1000, UTC)

        parsed = parse_state(pickle.dumps(state, protocol))

        assert parsed == RendezvousState(
            round=4,
            complete=True,
            closed=True,
            participants={Node("a", 1, 0): 0},
            wait_list=frozenset({Node("b", 2, 3)}),
            heartbeats={Node("a", 1, 0): 1000.0},
        )

    def test_nothing_is_executed(self, tmp_path: Path) -> None:
        """A pickle that calls a function is not parsed, and the call is not made."""
        mark = tmp_path / "mark"

        class Evil:
            def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
                return Path.touch, (mark,)

        evil = pickle.dumps(Evil())
        pickle.loads(evil)
        assert mark.exists()
        mark.unlink()

        assert parse_state(evil) is None
        assert not mark.exists()

    @pytest.mark.parametrize(
        "state",
        [
            None,
            {"round": 1},
            dynamic._NodeDesc("a", 1, 0),
            datetime.fromtimestamp(1000, UTC),
            print,
        ],
        ids=str,
    )
    def test_other_objects(self, state: Any) -> None:
        """A pickle of another object is None."""
        assert parse_state(pickle.dumps(state)) is None

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("round", "seven"),
            ("participants", [1, 2]),
            ("participants", {"a": 0}),
            ("participants", {1: 0}),
            ("participants", {dynamic._RendezvousState(): 0}),
            ("wait_list", {1}),
            ("last_heartbeats", {dynamic._NodeDesc("a", 1, 0): "now"}),
        ],
    )
    def test_wrong_fields(self, field: str, value: Any) -> None:
        """A state with fields of other types is None."""
        state = dynamic._RendezvousState()
        setattr(state, field, value)
        assert parse_state(pickle.dumps(state)) is None

    def test_missing_fields(self) -> None:
        """A state without all fields is None."""
        state = dynamic._RendezvousState()
        del state.wait_list
        assert parse_state(pickle.dumps(state)) is None

    @given(st.binary(max_size=200))
    def test_any_bytes(self, state: bytes) -> None:
        """Arbitrary bytes do not raise."""
        assert parse_state(state) is None

    @given(st.data())
    def test_damaged(self, data: st.DataObject) -> None:
        """A state with a changed byte or a missing end does not raise."""
        state = bytearray(pickled_state({"a": 1}, {"b": 2}))
        state[data.draw(st.integers(0, len(state) - 1))] = data.draw(
            st.integers(0, 255)
        )
        parse_state(bytes(state[: data.draw(st.integers(0, len(state)))]))

    @pytest.mark.parametrize("name", HOSTILE)
    def test_time_of_hostile_pickles(self, name: str) -> None:
        """A pickle that would block the process is refused; it takes 0.5 s at most.

        Without the limits these take minutes or never end, so a busy machine and
        coverage get a larger bound.
        """
        began = time.process_time()
        assert parse_state(HOSTILE[name]) is None
        assert time.process_time() - began < 10

    def test_memory_of_hostile_pickles(self) -> None:
        """No pickle takes more than 64 MB."""
        script = (
            "import resource\n"
            "from pathlib import Path\n"
            "from support.hostile_pickles import hostile_pickles\n"
            "from tracedstore.rendezvous.state import parse_state\n"
            "pickles = list(hostile_pickles().values())\n"
            "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
            "size = pages * resource.getpagesize() + 64 * 1024 * 1024\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
            "assert not any(map(parse_state, pickles))\n"
        )
        folder = Path(__file__).parent.parent
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    @given(st.lists(st.sampled_from(OPCODES), max_size=60))
    def test_any_opcodes(self, opcodes: list[bytes]) -> None:
        """Opcodes of a state in any order do not raise."""
        parse_state(b"\x80\x04" + b"".join(opcodes) + b".")

    def test_many_nodes(self) -> None:
        """The state of a job with 98,304 ranks is parsed."""
        state = parse_state(pickled_state({f"node{n}": 0 for n in range(12_288)}))
        assert state is not None
        assert len(state.participants) == len(state.heartbeats) == 12_288

    def test_too_large(self) -> None:
        """Bytes beyond the limit are not unpickled."""
        assert parse_state(pickled_state() + b"\x00" * 2**24) is None


class TestSilentSeconds:
    """The time since a node's last heartbeat."""

    def test_of_a_node(self) -> None:
        """It is 0 for a heartbeat in the future, and None without a heartbeat."""
        state = parse_state(pickled_state({"a": 5, "ahead": -60}))
        assert state is not None
        a, ahead = sorted(state.participants)
        now = time.time()

        assert state.silent_seconds(a, now) == pytest.approx(5, abs=2)
        assert state.silent_seconds(ahead, now) == 0
        assert state.silent_seconds(Node("unknown", 1, 1), now) is None


OWN = Node("own", 100, 0)


class TestAttendance:
    """The nodes that were seen, including those that have left."""

    def test_no_state(self) -> None:
        """Without a state there are no nodes."""
        attendance = Attendance()
        assert attendance.last is None
        assert attendance.joined(OWN) == attendance.left(OWN) == []

    def test_own_node_gave_up(self) -> None:
        """This node counts as joined after it has removed itself from the state."""
        attendance = Attendance()
        attendance.record(make_state("own", "b"))
        attendance.record(make_state())

        assert attendance.joined(OWN) == [OWN]
        assert attendance.left(OWN) == [Node("b", 101, 0)]

    def test_wait_list(self) -> None:
        """A node that waited and then joined is listed once."""
        attendance = Attendance()
        attendance.record(make_state("own", waiting=("b",)))
        assert attendance.waiting(OWN) == [Node("b", 200, 0)]

        state = dynamic._RendezvousState()
        state.participants[dynamic._NodeDesc("b", 200, 0)] = 0
        parsed = parse_state(pickle.dumps(state))
        assert parsed is not None
        attendance.record(parsed)

        assert attendance.waiting(None) == []
        assert attendance.joined(None) == [Node("b", 200, 0)]
        assert attendance.left(None) == [OWN]

    def test_another_round(self) -> None:
        """The nodes of an earlier round are forgotten."""
        attendance = Attendance()
        attendance.record(make_state("own", "b", round=1))
        attendance.record(make_state("own", round=2))

        assert attendance.joined(OWN) == [OWN]
        assert attendance.left(OWN) == []

    def test_absent(self) -> None:
        """Nodes of the last complete round that did not join again are absent."""
        attendance = Attendance()
        attendance.record(make_state("own", "b", "c", round=1, complete=True))
        assert attendance.absent(OWN) == {}
        attendance.reset()
        attendance.record(make_state("own", "b", round=2))

        absent = Node("c", 102, 0)
        assert attendance.absent(OWN) == {absent: 1}
        (silent,) = attendance.silent_seconds([absent], time.time() + 30)
        assert silent == pytest.approx(30, abs=5)

    def test_started_again(self) -> None:
        """A node with another pid on the same host is back."""
        attendance = Attendance()
        attendance.record(make_state("own", "b", "c", round=1, complete=True))
        attendance.record(make_state("own", "c", round=2))  # c has b's pid now

        assert attendance.absent(OWN) == {Node("b", 101, 0): 1}

    def test_silent_seconds_of_a_node_that_left(self) -> None:
        """It is counted from the last heartbeat seen."""
        attendance = Attendance()
        attendance.record(make_state("own", "b"))
        attendance.record(make_state("own"))
        now = time.time() + 30

        (silent,) = attendance.silent_seconds(attendance.left(OWN), now)
        assert silent == pytest.approx(30, abs=5)
        assert attendance.silent_seconds([Node("unknown", 1, 1)], now) == [None]


class TestSilentRanks:
    """The nodes of a round without heartbeats, by rank."""

    def test_node_that_torch_removed(self) -> None:
        """It is silent by its last heartbeat, and keeps the rank of its round."""
        attendance, now, node = Attendance(), time.time(), Node("b", 101, 0)
        state = make_state("own", "b", round=1, complete=True)
        attendance.record(replace(state, participants={OWN: 1, node: 0}))
        assert attendance.silent_ranks(OWN, 10, now) == {}

        attendance.record(make_state("own", round=1, complete=True))

        ((rank, (found, age)),) = attendance.silent_ranks(OWN, 10, now + 30).items()
        assert (rank, found) == (0, node)
        assert age == pytest.approx(30, abs=5)
        attendance.record(make_state("own", round=2, complete=True))
        assert attendance.silent_ranks(OWN, 10, now + 30) == {}

    def test_closed(self) -> None:
        """Nobody sends heartbeats to a rendezvous that is closed."""
        attendance = Attendance()
        attendance.record(make_state("own", "b", complete=True))
        attendance.record(make_state("own", "b", complete=True, closed=True))

        assert attendance.silent_ranks(OWN, 10, time.time() + 30) == {}


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
