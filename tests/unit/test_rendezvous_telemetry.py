"""The causes that events of a failed rendezvous have."""

import socket
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

import tracedstore
from support.events import Events
from support.rendezvous import pickled_state
from tracedstore.rendezvous.rendezvous_telemetry import (
    JoinAttempt,
    emit_failure,
    emit_waiting,
)
from tracedstore.rendezvous.state import Attendance, Node, RendezvousState, parse_state


def seen(*joined: str, **fields: Any) -> RendezvousState:
    """Return a state with these nodes."""
    state = parse_state(pickled_state(dict.fromkeys(joined, 0), {}, **fields))
    assert state is not None
    return state


def attempt(
    *joined: str,
    endpoint: tuple[str, int] | None = None,
    earlier: RendezvousState | None = None,
    min_nodes: int = 2,
) -> JoinAttempt:
    """Return an attempt of node0, after these nodes were seen to join."""
    attendance = Attendance()
    if earlier is not None:
        attendance.record(earlier)
    state = seen(*joined, round=1)
    attendance.record(state)
    own = next(node for node in state.participants if node.addr == "node0")
    return JoinAttempt(
        backend="c10d",
        run_id="job-7",
        endpoint="node0:29400",
        during="next_rendezvous",
        waited_seconds=5.0,
        min_nodes=min_nodes,
        max_nodes=min_nodes,
        where=endpoint,
        own=Node(own.addr, own.pid, own.local_id),
        attendance=attendance,
    )


def timed_out() -> RendezvousConnectionError:
    """Return what torch raises when a key is not written, with its cause."""
    error = RendezvousConnectionError("the connection has failed")
    error.__cause__ = dist.DistStoreError("wait timeout after 5000ms, keys: /k")
    return error


@pytest.fixture
def closed_port() -> int:
    """A port that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class TestMissingNodes:
    """The nodes that a round waits for."""

    def waiting(self, events: Events, tried: JoinAttempt) -> dict[str, Any]:
        """Return the event of a node that waits."""
        tracedstore.configure(log_format="json")
        emit_waiting(tried)
        return events()[-1]

    def test_never_joined(self, events: Events) -> None:
        """Nodes that never joined have no name."""
        event = self.waiting(events, attempt("node0", min_nodes=3))

        assert event["missing_count"] == 2
        assert event["missing_names"] == [None, None]
        assert event["missing_causes"] == ["not_started", "not_started"]
        assert event["message"].endswith("waiting for 2 nodes that have not joined yet")

    def test_hosts_of_a_launcher(
        self, events: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nodes that never joined have the names of Slurm's other hosts."""
        monkeypatch.setenv("SLURM_STEP_NODELIST", "node[0-3]")
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x4)")
        earlier = seen("node0", "node1.cluster", round=0, complete=True)
        tried = attempt("node0", earlier=earlier, min_nodes=4)

        event = self.waiting(events, tried)

        assert event["missing_names"] == ["node1.cluster", "node2", "node3"]
        assert event["missing_causes"] == ["gone", "not_started", "not_started"]
        assert event["message"].endswith("; node2: never joined; node3: never joined")

    def test_left(self, events: Events) -> None:
        """A node that left this round is gone."""
        tried = attempt("node0", earlier=seen("node0", "node1", round=1))

        event = self.waiting(events, tried)

        assert (event["missing_count"], event["missing_names"]) == (1, ["node1"])
        assert event["missing_causes"] == ["gone"]
        assert event["missing_doing"][0].startswith("left this round, last heartbeat")
        assert "waiting for" not in event["message"]
        assert "joined and left: node1" in event["message"]

    def test_not_back(self, events: Events) -> None:
        """A node of the last complete round that has not joined again is gone."""
        earlier = seen("node0", "node1", "node2", round=0, complete=True)
        tried = attempt("node0", "node2", earlier=earlier, min_nodes=4)

        event = self.waiting(events, tried)

        assert event["missing_count"] == 2
        assert event["missing_names"] == ["node1", None]
        assert event["missing_causes"] == ["gone", "not_started"]
        assert "; waiting for node1 (pid 101): was in round 0," in event["message"]
        assert event["message"].endswith("; 1 node that has not joined yet")

    @pytest.mark.parametrize("fields", [{"complete": True}, {"closed": True}])
    def test_nothing_is_missing(self, events: Events, fields: dict[str, Any]) -> None:
        """A round that is complete or closed waits for no node."""
        tried = attempt("node0", min_nodes=3)
        assert tried.attendance is not None
        tried.attendance.record(seen("node0", round=1, **fields))

        event = self.waiting(events, tried)

        assert (event["missing_count"], event["missing_names"]) == (0, [])


class TestKeyThatWasNotWritten:
    """A wait for a key of another node timed out."""

    def cause(self, events: Events, tried: JoinAttempt) -> Any:
        """Return the cause that the event has."""
        tracedstore.configure(log_format="json")
        emit_failure(timed_out(), tried)
        return events()[-1]["cause"]

    def test_another_node_joined(self, events: Events) -> None:
        """That node did not write it."""
        tried = attempt("node0", "node1", endpoint=None)

        assert self.cause(events, tried) == "not_written"

    def test_server_is_gone(self, events: Events, closed_port: int) -> None:
        """No other node joined, and the endpoint refuses connections."""
        tried = attempt("node0", endpoint=("127.0.0.1", closed_port))

        assert self.cause(events, tried) == "refused"

    def test_server_does_not_respond(self, events: Events) -> None:
        """No other node joined, so none is blamed."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            tried = attempt("node0", endpoint=server.getsockname())

            assert self.cause(events, tried) == "no_answer"


@pytest.mark.parametrize(
    ("lacks_server", "cause"), [(True, "rank_0_replaced"), (False, "unknown")]
)
def test_rank_0_is_replaced(events: Events, lacks_server: bool, cause: str) -> None:
    """Torch before 2.13 asserts that a node which becomes rank 0 has a server."""
    tracedstore.configure(log_format="json")
    error = AssertionError()

    emit_failure(error, replace(attempt("node0", "node1"), lacks_server=lacks_server))

    assert events()[-1]["cause"] == cause
    helps = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(error)
    assert helps is lacks_server
