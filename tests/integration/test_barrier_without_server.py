"""The store's server ends while ranks, real processes, wait at a barrier."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import etcd
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

import tracedstore
from integration.children.fleet import connect
from integration.conftest import StartChild
from integration.fleets import Fleet, FleetBarrier
from integration.harness import Child
from support.etcd import EtcdServer
from support.events import check

pytestmark = pytest.mark.processes

# Longer than any test, so that no barrier times out.
TIMEOUT = 300.0
# The exception of each kind of store, and its error_type in events.
ERRORS = {
    "tcp": ("DistNetworkError", "torch.distributed.DistNetworkError"),
    "etcd": ("EtcdConnectionFailed", "etcd.EtcdConnectionFailed"),
}

Kill = Callable[[], None]


@pytest.fixture(params=ERRORS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind of store that has a server."""
    name: str = request.param
    return name


@pytest.fixture
def server(
    kind: str, start_child: StartChild, tmp_path: Path
) -> Iterator[tuple[str, Kill]]:
    """Return the address of a new server, and a function that kills it."""
    if kind == "tcp":
        child = start_child("tcp_server")
        yield str(child.next_report()["port"]), child.kill
        return
    etcd = EtcdServer(tmp_path)
    etcd.start()
    yield f"{etcd.port},/fleet", etcd.kill
    etcd.stop()


@pytest.fixture
def barrier(
    kind: str, server: tuple[str, Kill], start_child: StartChild
) -> FleetBarrier:
    """Return a barrier over that server."""
    address, _ = server
    fleet = Fleet(start_child("fleet", kind, address), connect(kind, address))
    return FleetBarrier(fleet, kind)


class TestKilled:
    """The server is killed with SIGKILL."""

    def test_error_of_store(
        self, kind: str, barrier: FleetBarrier, server: tuple[str, Kill]
    ) -> None:
        """Every rank gets the store's exception and reports no missing rank."""
        _, kill = server
        exception, error_type = ERRORS[kind]
        barrier.start(0, 1, 2, timeout=TIMEOUT)
        barrier.wait_for_arrivals(3)

        kill()
        reports = barrier.results(0, 1, 2)

        assert [report["result"] for report in reports] == [exception] * 3
        failed = barrier.events("barrier.failed")
        assert sorted(event["rank"] for event in failed) == [0, 1, 2]
        for event in failed:
            check(event)
            assert event["error_type"] == error_type
            assert event["error"]
            assert 0 < event["waited_seconds"] < TIMEOUT / 2
        assert not barrier.events("barrier.timeout")
        assert not barrier.events("telemetry.disabled")


class TestKilledAtTimeout:
    """Rank 0 often serves the store, times out first and ends the server."""

    def test_others_time_out(self, tcp_server: Child) -> None:
        """The other ranks time out when they are due, with or without names.

        A new connection would block until the store's own timeout is over.
        """

        class TCPStore(dist.TCPStore):
            """A store, named like torch's, whose server ends when a wait times out."""

            def wait(self, *args: Any) -> None:
                """Wait, and kill the server if that times out."""
                try:
                    super().wait(*args)
                except dist.DistStoreError:
                    tcp_server.kill()
                    raise

        port = tcp_server.next_report()["port"]
        store_timeout = timedelta(hours=1)
        store = TCPStore(
            "127.0.0.1", port, None, is_master=False, timeout=store_timeout
        )

        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            tracedstore.barrier(store, 3, "b", 0.5, rank=1)

        assert raised.value.missing_ranks == ()
        assert "the missing ranks could not be determined" in str(raised.value)


class TestPaused:
    """The server is stopped with SIGSTOP and does not respond."""

    def test_verdict_is_bounded(self, tmp_path: Path) -> None:
        """The barrier ends, though a call would never return, and names no rank.

        The server is stopped as the rank begins to watch, because torch bounds no other
        request by the barrier's timeout. The client may report the failed connection
        after its retries, as it does without a wrapper.
        """
        server = EtcdServer(tmp_path)
        server.start()

        class PausingClient(etcd.Client):
            """A client whose server is stopped when it watches."""

            def watch(self, key: str, **options: Any) -> Any:
                """Stop the server, and watch."""
                server.pause()
                return super().watch(key, **options)

        try:
            # So long would a call without a bound take.
            client = PausingClient(
                host="127.0.0.1", port=server.port, read_timeout=2000
            )
            store = tracedstore.wrap(EtcdStore(client, "/paused"))
            with pytest.raises(
                (tracedstore.BarrierTimeout, etcd.EtcdConnectionFailed)
            ) as raised:
                tracedstore.barrier(store, 2, "b", 3, rank=0)
        finally:
            server.resume()
            server.stop()

        assert getattr(raised.value, "missing_ranks", ()) == ()
