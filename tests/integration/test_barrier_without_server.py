"""The store's server is gone while ranks, real processes, wait at a barrier."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tracedstore
from integration.children.fleet import connect
from integration.conftest import StartChild
from integration.fleets import Fleet, Meeting
from integration.harness import Child
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
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store that has a server."""
    name: str = request.param
    return name


@pytest.fixture
def server(
    kind: str, start_child: StartChild, tmp_path: Path
) -> Iterator[tuple[str, Kill]]:
    """A server of the test's own: where it is, and how to kill it."""
    if kind == "tcp":
        child = start_child("tcp_server")
        yield str(child.next_report()["port"]), child.kill
        return
    etcd = EtcdServer(tmp_path)
    etcd.start()
    yield f"{etcd.port},/fleet", etcd.kill
    etcd.stop()


@pytest.fixture
def meeting(kind: str, server: tuple[str, Kill], start_child: StartChild) -> Meeting:
    """A barrier through it."""
    where, _ = server
    return Meeting(Fleet(start_child("fleet", kind, where), connect(kind, where)), kind)


class TestKilled:
    """The server is killed, with SIGKILL."""

    def test_the_stores_own_error(
        self, kind: str, meeting: Meeting, server: tuple[str, Kill]
    ) -> None:
        """Every rank gets it, at once, and tells; nobody is called missing."""
        _, kill = server
        raised, told_as = ERRORS[kind]
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


class TestGoneAtTheTimeout:
    """Rank 0 often serves the store, is the first to give up, and takes it along."""

    def test_soon(self, tcp_server: Child) -> None:
        """The others have their timeout when it is due, with or without names.

        A new connection could not be had before the store's own timeout is over.
        """

        class TCPStore(dist.TCPStore):
            """By name too; its server is gone when a wait times out."""

            def wait(self, *args: Any) -> None:
                """Wait, and kill the server if that was in vain."""
                try:
                    super().wait(*args)
                except dist.DistStoreError:
                    tcp_server.kill()
                    raise

        port = tcp_server.next_report()["port"]
        own_timeout = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=own_timeout)

        began = time.monotonic()
        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            tracedstore.barrier(store, 3, "b", 0.5, rank=1)

        assert time.monotonic() - began < 10
        assert raised.value.missing_ranks == ()
        assert "the missing ranks could not be determined" in str(raised.value)
