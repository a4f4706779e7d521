"""The causes that events of a failed rendezvous have."""

import socket
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

import tracedstore
from support.events import Events
from support.rendezvous import pickled_state
from tracedstore.rendezvous.rendezvous_telemetry import JoinAttempt, emit_failure
from tracedstore.rendezvous.state import Attendance, Node, parse_state


def attempt(*joined: str, endpoint: tuple[str, int] | None) -> JoinAttempt:
    """Return an attempt of node0, after these nodes were seen to join."""
    attendance = Attendance()
    state = parse_state(pickled_state(dict.fromkeys(joined, 0), {}))
    assert state is not None
    attendance.record(state)
    own = next(node for node in state.participants if node.addr == "node0")
    return JoinAttempt(
        backend="c10d",
        run_id="job-7",
        endpoint="node0:29400",
        during="next_rendezvous",
        waited_seconds=5.0,
        min_nodes=2,
        max_nodes=2,
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
