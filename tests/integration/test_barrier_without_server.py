"""The store's server is gone while ranks, real processes, wait at a barrier."""

from collections.abc import Callable
from pathlib import Path

import pytest

from integration.children.fleet import connect
from integration.conftest import StartChild
from integration.fleets import Fleet, Meeting
from support.etcd import EtcdServer
from support.events import check

pytestmark = pytest.mark.processes

# Longer than any test: nobody gets as far.
TIMEOUT = 50.0
# What each store raises then, and what it is called in events.
ERRORS = {
    "tcp": ("DistNetworkError", "torch.distributed.DistNetworkError"),
    "etcd": ("EtcdConnectionFailed", "etcd.EtcdConnectionFailed"),
}

Kill = Callable[[], None]


@pytest.fixture(params=ERRORS)
def meeting_and_kill(
    request: pytest.FixtureRequest, start_child: StartChild, tmp_path: Path
) -> tuple[Meeting, Kill]:
    """A barrier of a fleet that has a server to itself, and how to kill that."""
    if request.param == "tcp":
        server = start_child("tcp_server")
        where, kill = str(server.next_report()["port"]), server.kill
    else:
        etcd = EtcdServer(tmp_path)
        request.addfinalizer(etcd.stop)
        etcd.start()
        where, kill = f"{etcd.port},/fleet", etcd.kill
    child = start_child("fleet", request.param, where)
    fleet = Fleet(child, connect(request.param, where))
    return Meeting(fleet, request.param), kill


class TestKilled:
    """The server is killed, with SIGKILL."""

    def test_the_stores_own_error(self, meeting_and_kill: tuple[Meeting, Kill]) -> None:
        """Every rank gets it, at once, and tells; nobody is called missing."""
        meeting, kill = meeting_and_kill
        raised, told_as = ERRORS[meeting.kind]
        meeting.start(0, 1, 2, timeout=TIMEOUT)
        meeting.arrived(3)

        kill()
        results = meeting.results(0, 1, 2)

        assert [one["result"] for one in results] == [raised] * 3
        failed = meeting.events("barrier.failed")
        assert sorted(event["rank"] for event in failed) == [0, 1, 2]
        for event in failed:
            check(event)
            assert event["error_type"] == told_as
            assert event["error"]
            assert 0 < event["waited_seconds"] < TIMEOUT / 2
        assert not meeting.events("barrier.timeout")
        assert not meeting.events("telemetry.disabled")
