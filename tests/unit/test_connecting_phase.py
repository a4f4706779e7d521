"""The constructor of a store that fails: which process of a host reports it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import DistNetworkError

import tracedstore
from support.etcd import free_port
from tracedstore.diagnosis.connection.addresses import ConnectTarget
from tracedstore.diagnosis.connection.connecting import ConnectingPhase
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.stall_reports import claim

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def target() -> Iterator[ConnectTarget]:
    """An address where no process listens."""
    tracedstore.configure(log_format="json")
    yield ConnectTarget(
        host="127.0.0.1", port_text=str(free_port()), rank=1, world_size=3
    )
    stall_reports.reset()


def fail(phase: ConnectingPhase) -> DistNetworkError:
    """End the constructor as torch does; return the exception."""
    error = DistNetworkError("The client socket has timed out after 6000ms")
    phase.failed(error)
    (note,) = error.__notes__
    assert "rank 0: does not listen" in note
    return error


@pytest.mark.parametrize("stall_after", [0.0, 600.0])
def test_the_process_that_claimed_has_ended(
    target: ConnectTarget, events: Events, stall_after: float
) -> None:
    """Another process of the host reported and failed first: this one adds a note."""
    other = claim(f"{target.server}/server_unreachable")
    assert other is not None
    phase = ConnectingPhase(target, stall_after)
    phase._look()
    other.close()

    fail(phase)

    assert not [one for one in events() if one["event"] == "job.stalled"]


def test_each_attempt_of_a_process_is_reported(
    target: ConnectTarget, events: Events
) -> None:
    """A process that tries again reports again, and keeps its claim on this host."""
    for _ in range(2):
        fail(ConnectingPhase(target, 600.0))

    reports = [one for one in events() if one["event"] == "job.stalled"]
    assert [one["cause"] for one in reports] == ["server_unreachable"] * 2
    assert claim(f"{target.server}/server_unreachable") is None
