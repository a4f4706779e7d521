"""Reading the state of a rendezvous: torch's is read, anything else is let be."""

import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from support.rendezvous import a_state
from tracedstore.rendezvous.state import Attendance, Node, RendezvousState, read


def snapshot(
    *joined: str, waiting: tuple[str, ...] = (), **facts: Any
) -> RendezvousState:
    """A state with these nodes, all of them just heard of."""
    found = read(a_state(dict.fromkeys(joined, 0), dict.fromkeys(waiting, 0), **facts))
    assert found is not None
    return found


class TestRead:
    """From bytes to a snapshot."""

    @pytest.mark.parametrize("protocol", [3, 4, 5])
    def test_torchs(self, protocol: int) -> None:
        """By the protocols that Python writes by default, has so, or will."""
        state = dynamic._RendezvousState()
        node, other = dynamic._NodeDesc("a", 1, 0), dynamic._NodeDesc("b", 2, 3)
        state.round, state.complete, state.closed = 4, True, True
        state.deadline = datetime.now(UTC)
        state.participants[node] = 0
        state.wait_list.add(other)
        state.redundancy_list.add(other)
        state.last_heartbeats[node] = datetime.fromtimestamp(1000, UTC)

        found = read(pickle.dumps(state, protocol))

        assert found == RendezvousState(
            round=4,
            complete=True,
            closed=True,
            participants={Node("a", 1, 0): 0},
            wait_list=frozenset({Node("b", 2, 3)}),
            heartbeats={Node("a", 1, 0): 1000.0},
        )

    def test_nothing_is_executed(self, tmp_path: Path) -> None:
        """A pickle that would run a command does not."""
        mark = tmp_path / "mark"

        class Evil:
            def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
                return Path.touch, (mark,)

        evil = pickle.dumps(Evil())
        pickle.loads(evil)
        assert mark.exists()
        mark.unlink()

        assert read(evil) is None
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
    def test_something_else(self, state: Any) -> None:
        """Another object is not one."""
        assert read(pickle.dumps(state)) is None

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("round", "seven"),
            ("participants", [1, 2]),
            ("participants", {"a": 0}),
            ("wait_list", {1}),
            ("last_heartbeats", {dynamic._NodeDesc("a", 1, 0): "now"}),
        ],
    )
    def test_wrong_fields(self, field: str, value: Any) -> None:
        """A state of another torch, or of nobody's, is not one either."""
        state = dynamic._RendezvousState()
        setattr(state, field, value)
        assert read(pickle.dumps(state)) is None

    def test_lacking_fields(self) -> None:
        """Likewise."""
        state = dynamic._RendezvousState()
        del state.wait_list
        assert read(pickle.dumps(state)) is None

    @given(st.binary(max_size=200))
    def test_any_bytes(self, state: bytes) -> None:
        """Nothing raises."""
        assert read(state) is None

    @given(st.data())
    def test_damaged(self, data: st.DataObject) -> None:
        """A state with a byte changed, or cut, is read or is not; it never raises."""
        state = bytearray(a_state({"a": 1}, {"b": 2}))
        state[data.draw(st.integers(0, len(state) - 1))] = data.draw(
            st.integers(0, 255)
        )
        read(bytes(state[: data.draw(st.integers(0, len(state)))]))

    def test_huge(self) -> None:
        """What no rendezvous can be is not even looked at."""
        assert read(a_state() + b"\x00" * 2**24) is None


class TestSilence:
    """How long a node has not been heard of."""

    def test_of_a_node(self) -> None:
        """By its last heartbeat; one that is ahead of us is not silent at all."""
        found = read(a_state({"a": 5, "ahead": -60}))
        assert found is not None
        a, ahead = sorted(found.participants)
        now = time.time()

        assert found.silent(a, now) == pytest.approx(5, abs=2)
        assert found.silent(ahead, now) == 0
        assert found.silent(Node("nobody", 1, 1), now) is None


OWN = Node("own", 100, 0)


class TestAttendance:
    """Who was there, told when some have gone."""

    def test_nothing_seen(self) -> None:
        """Then nobody was."""
        attendance = Attendance()
        assert attendance.last is None
        assert attendance.joined(OWN) == attendance.left(OWN) == []

    def test_own_node_gave_up(self) -> None:
        """This node is told as joined though it took itself off the state."""
        attendance = Attendance()
        attendance.saw(snapshot("own", "b"))
        attendance.saw(snapshot())

        assert attendance.joined(OWN) == [OWN]
        assert attendance.left(OWN) == [Node("b", 101, 0)]

    def test_wait_list(self) -> None:
        """One that waited and then joined is told once."""
        attendance = Attendance()
        attendance.saw(snapshot("own", waiting=("b",)))
        assert attendance.waiting(OWN) == [Node("b", 200, 0)]

        state = dynamic._RendezvousState()
        state.participants[dynamic._NodeDesc("b", 200, 0)] = 0
        found = read(pickle.dumps(state))
        assert found is not None
        attendance.saw(found)

        assert attendance.waiting(None) == []
        assert attendance.joined(None) == [Node("b", 200, 0)]
        assert attendance.left(None) == [OWN]

    def test_another_round(self) -> None:
        """Who was in the last round only is no concern of this one."""
        attendance = Attendance()
        attendance.saw(snapshot("own", "b", round=1))
        attendance.saw(snapshot("own", round=2))

        assert attendance.joined(OWN) == [OWN]
        assert attendance.left(OWN) == []

    def test_silence_of_those_who_left(self) -> None:
        """Counted from their last heartbeat that was seen."""
        attendance = Attendance()
        attendance.saw(snapshot("own", "b"))
        attendance.saw(snapshot("own"))
        now = time.time() + 30

        (silent,) = attendance.silent(attendance.left(OWN), now)
        assert silent == pytest.approx(30, abs=5)
        assert attendance.silent([Node("nobody", 1, 1)], now) == [None]
