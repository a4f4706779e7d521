"""The server of a TCPStore dies or hangs while somebody is in a call."""

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
from integration.harness import Child, counted, in_background, wait_until

pytestmark = pytest.mark.processes

Events = Callable[[], list[dict[str, Any]]]

BLOCKING: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("never"),
    "wait": lambda store: store.wait(["never", "ever"]),
    "multi_get": lambda store: store.multi_get(["never", "ever"]),
    "barrier": lambda store: store.barrier("never", 3),
}


def client(port: int) -> dist.TCPStore:
    """A connection that waits longer than any test."""
    return dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=50)
    )


def blocked(name: str, for_seconds: float = 0.0) -> tracedstore.InFlight | None:
    """The call that a thread has been in for a time, if it has."""
    for call in tracedstore.in_flight():
        if call.thread == name and call.waited_seconds > for_seconds:
            return call
    return None


class TestKilled:
    """The server is gone from one moment to the next."""

    @pytest.mark.parametrize("operation", BLOCKING)
    def test_as_bare(
        self,
        registry: CollectorRegistry,
        events: Events,
        tcp_server: Child,
        operation: str,
    ) -> None:
        """The caller gets what a bare store raises; it is counted, and told of."""
        tracedstore.configure(registry=registry, log_format="json")
        call = BLOCKING[operation]
        port = tcp_server.next_report()["port"]
        bare, traced = client(port), tracedstore.wrap(client(port))
        # Bare first: when the traced one has been in its call for a while, so has it.
        of_bare = in_background(lambda: call(bare))
        of_traced = in_background(lambda: call(traced), "victim")
        wait_until(lambda: blocked("victim", for_seconds=0.1))

        tcp_server.kill()
        expected, error = of_bare.exception(15), of_traced.exception(15)

        assert type(error) is type(expected) is dist.DistNetworkError
        assert str(error).splitlines()[0] == str(expected).splitlines()[0]
        error_type = "torch.distributed.DistNetworkError"
        assert counted(registry, "tcp_store", operation, error_type) == 1
        (failed,) = [e for e in events() if e["event"] == "store.operation.failed"]
        assert failed["operation"] == operation
        assert failed["key"] == "never"
        assert failed["error_type"] == error_type
        assert tracedstore.in_flight() == []

    def test_calls_afterwards(
        self, registry: CollectorRegistry, tcp_server: Child
    ) -> None:
        """Every later call fails as it does with bare, and all are counted."""
        tracedstore.configure(registry=registry, log_format="off")
        port = tcp_server.next_report()["port"]
        stores = [client(port), tracedstore.wrap(client(port))]

        tcp_server.kill()
        raised = []
        for store in stores:
            for _ in range(3):
                with pytest.raises(dist.DistNetworkError) as error:
                    store.get("k")
                raised.append(type(error.value))

        assert raised[:3] == raised[3:]
        error_type = "torch.distributed.DistNetworkError"
        assert counted(registry, "tcp_store", "get", error_type) == 3


class TestStopped:
    """The server is there and does not answer, until it does."""

    def test_seen_while_it_lasts(
        self, registry: CollectorRegistry, events: Events, tcp_server: Child
    ) -> None:
        """The call shows with its key and thread, and is warned of, before it ends."""
        tracedstore.configure(registry=registry, stall_after=0.2, log_format="json")
        port = tcp_server.next_report()["port"]
        store = tracedstore.wrap(client(port))
        store.set("config/7", "value")

        os.kill(tcp_server.pid, signal.SIGSTOP)
        answer = in_background(lambda: store.get("config/7"), "reader")
        first = wait_until(lambda: blocked("reader"))
        (stalled, *_) = wait_until(
            lambda: [e for e in events() if e["event"] == "store.operation.stalled"]
        )
        later = wait_until(lambda: blocked("reader"))
        still_blocked = not answer.done()
        os.kill(tcp_server.pid, signal.SIGCONT)

        assert answer.result(15) == b"value"
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
        assert counted(registry, "tcp_store", "get") == 1
        assert tracedstore.in_flight() == []

    def test_calls_queue_behind_it(
        self, registry: CollectorRegistry, tcp_server: Child
    ) -> None:
        """Calls behind the blocked one, on its connection, show as in flight too."""
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(client(tcp_server.next_report()["port"]))
        store.set("k", "v")

        os.kill(tcp_server.pid, signal.SIGSTOP)
        answers = [
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

        assert [answer.result(15) for answer in answers] == [b"v"] * 4
        assert in_flight == 4
        assert threads == {f"reader {number}" for number in range(4)}
        assert threading.current_thread().name not in threads
        assert tracedstore.in_flight() == []
