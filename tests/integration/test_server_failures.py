"""The server of a TCPStore is killed or stopped during a call."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry

import tracedstore
from integration.harness import Child, in_background, operation_count, pause, wait_until
from support.versions import needs_store_barrier
from tracedstore.diagnosis.connection.connection_attempt import probe_server

pytestmark = pytest.mark.processes

Events = Callable[[], list[dict[str, Any]]]

BLOCKING: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("never"),
    "wait": lambda store: store.wait(["never", "ever"]),
    "multi_get": lambda store: store.multi_get(["never", "ever"]),
    "barrier": lambda store: store.barrier("never", 3),
}


def client(port: int) -> dist.TCPStore:
    """Return a connection with a timeout longer than any test."""
    return dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=50)
    )


def blocked(name: str, for_seconds: float = 0.0) -> tracedstore.InFlight | None:
    """Return the call that a thread has been in for more than a time, or None."""
    for call in tracedstore.in_flight():
        if call.thread == name and call.waited_seconds > for_seconds:
            return call
    return None


class TestKilled:
    """The server is killed."""

    def test_note_is_of_now(self, tcp_server: Child) -> None:
        """The server accepted a connection a moment before the call failed."""
        tracedstore.configure(log_format="off")
        port = tcp_server.next_report()["port"]
        store = tracedstore.wrap(client(port))
        call = in_background(lambda: store.get("never"), "traced")
        wait_until(lambda: blocked("traced"))
        assert probe_server("127.0.0.1", port) == ""

        tcp_server.kill()

        error = call.exception(60)
        assert error is not None
        (note,) = error.__notes__
        assert "it refuses connections: its process has ended" in note
        assert "accepts" not in note

    @pytest.mark.parametrize(
        "operation",
        [
            pytest.param(name, marks=needs_store_barrier if name == "barrier" else ())
            for name in BLOCKING
        ],
    )
    def test_raises_same(
        self,
        registry: CollectorRegistry,
        events: Events,
        tcp_server: Child,
        operation: str,
    ) -> None:
        """The caller gets the bare store's exception, counted and logged."""
        tracedstore.configure(registry=registry, log_format="json")
        call = BLOCKING[operation]
        port = tcp_server.next_report()["port"]
        bare, traced = client(port), tracedstore.wrap(client(port))
        # Bare first: it is blocked for longer than the traced one.
        bare_call = in_background(lambda: call(bare))
        traced_call = in_background(lambda: call(traced), "traced")
        wait_until(lambda: blocked("traced", for_seconds=0.1))

        tcp_server.kill()
        expected, error = bare_call.exception(60), traced_call.exception(60)

        assert type(error) is type(expected) is dist.DistNetworkError
        assert str(error).splitlines()[0] == str(expected).splitlines()[0]
        error_type = "torch.distributed.DistNetworkError"
        assert operation_count(registry, "tcp_store", operation, error_type) == 1
        (failed,) = [e for e in events() if e["event"] == "store.operation.failed"]
        assert failed["operation"] == operation
        assert failed["key"] == "never"
        assert failed["error_type"] == error_type
        assert tracedstore.in_flight() == []

    def test_calls_afterwards(
        self, registry: CollectorRegistry, tcp_server: Child
    ) -> None:
        """Every later call fails as with a bare store, and all are counted."""
        tracedstore.configure(registry=registry, log_format="off")
        port = tcp_server.next_report()["port"]
        stores = [client(port), tracedstore.wrap(client(port))]

        tcp_server.kill()
        error_types = []
        for store in stores:
            for _ in range(3):
                with pytest.raises(dist.DistNetworkError) as error:
                    store.get("k")
                error_types.append(type(error.value))

        assert error_types[:3] == error_types[3:]
        error_type = "torch.distributed.DistNetworkError"
        assert operation_count(registry, "tcp_store", "get", error_type) == 3


class TestStopped:
    """The server is stopped with SIGSTOP and continued later."""

    def test_blocked_call_is_reported(
        self, registry: CollectorRegistry, events: Events, tcp_server: Child
    ) -> None:
        """The call is in flight with key and thread, and reported before it ends."""
        tracedstore.configure(registry=registry, stall_after=0.2, log_format="json")
        port = tcp_server.next_report()["port"]
        store = tracedstore.wrap(client(port))
        store.set("config/7", "value")

        pause(tcp_server.pid)
        value = in_background(lambda: store.get("config/7"), "reader")
        first = wait_until(lambda: blocked("reader"))
        (stalled, *_) = wait_until(
            lambda: [e for e in events() if e["event"] == "store.operation.stalled"]
        )
        later = wait_until(lambda: blocked("reader"))
        still_blocked = not value.done()
        os.kill(tcp_server.pid, signal.SIGCONT)

        assert value.result(60) == b"value"
        assert still_blocked
        assert (first.operation, first.key, first.key_family, first.server) == (
            "get",
            "config/7",
            "config/*",
            f"127.0.0.1:{port}",
        )
        assert later.started == pytest.approx(first.started, abs=0.05)
        assert later.waited_seconds > max(first.waited_seconds, 0.2)
        assert (stalled["operation"], stalled["key"], stalled["thread"]) == (
            "get",
            "config/7",
            "reader",
        )
        assert 0.2 <= stalled["waited_seconds"] <= later.waited_seconds
        assert operation_count(registry, "tcp_store", "get") == 1
        assert tracedstore.in_flight() == []

    def test_queued_calls(self, registry: CollectorRegistry, tcp_server: Child) -> None:
        """Calls that wait for the blocked one's connection are in flight too."""
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(client(tcp_server.next_report()["port"]))
        store.set("k", "v")

        pause(tcp_server.pid)
        values = [
            in_background(lambda: store.get("k"), f"reader {number}")
            for number in range(4)
        ]
        wait_until(lambda: len(tracedstore.in_flight()) == 4)
        in_flight = registry.get_sample_value(
            "tracedstore_operations_in_flight",
            {"store": "tcp_store", "operation": "get"},
        )
        threads = {call.thread for call in tracedstore.in_flight()}
        os.kill(tcp_server.pid, signal.SIGCONT)

        assert [value.result(60) for value in values] == [b"v"] * 4
        assert in_flight == 4
        assert threads == {f"reader {number}" for number in range(4)}
        assert threading.current_thread().name not in threads
        assert tracedstore.in_flight() == []
