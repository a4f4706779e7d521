"""Fork in a given situation. Arguments: its name, a TCPStore's port if it needs one."""

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from prometheus_client import CollectorRegistry

import tracedstore
from integration.harness import (
    forked,
    in_background,
    operation_counts,
    report,
    wait_until,
)

registry = CollectorRegistry()
errors = io.StringIO()


def client(port: int) -> dist.TCPStore:
    """Return a new connection."""
    return dist.TCPStore("127.0.0.1", port, None, is_master=False)


def stalled_here(key: str) -> bool:
    """Return whether this process has reported a blocked call as stalled."""
    events = [json.loads(line) for line in errors.getvalue().splitlines(keepends=True)]
    return ("store.operation.stalled", key, os.getpid()) in [
        (event["event"], event.get("key"), event["pid"]) for event in events
    ]


def block_until_stalled(
    store: tracedstore.TracedStore, key: str, setter: dist.Store
) -> int:
    """Block in a call until it is reported; return the number of calls in flight."""
    value = in_background(lambda: store.get(key))
    wait_until(lambda: stalled_here(key))
    in_flight = len(tracedstore.in_flight())
    setter.set(key, "value")
    assert value.result(60) == b"value"
    return in_flight


def with_running_watcher(port: int) -> None:
    """Fork a parent that has stores and a running watcher."""
    sys.stderr = errors
    tracedstore.configure(registry=registry, stall_after=0.2, log_format="json")
    over_tcp, hashed = (
        tracedstore.wrap(client(port)),
        tracedstore.wrap(dist.HashStore()),
    )
    over_tcp.set("writer", "parent")
    hashed.set("writer", "parent")
    assert "tracedstore-watcher" in {t.name for t in threading.enumerate()}

    def child() -> dict[str, Any]:
        counted_before = operation_counts(registry)
        threads = [thread.name for thread in threading.enumerate()]
        inherited = hashed.get("writer").decode()
        hashed.set("writer", "child")
        own = tracedstore.wrap(client(port))
        read = own.get("writer").decode()
        in_flight = block_until_stalled(own, "for the child", client(port))
        return {
            "counted_before": counted_before,
            "threads": threads,
            "inherited": inherited,
            "read": read,
            "in_flight": in_flight,
            "counted": operation_counts(registry),
        }

    child_report = forked(child)
    assert hashed.get("writer") == b"parent"
    assert over_tcp.get("writer") == b"parent"
    in_flight = block_until_stalled(over_tcp, "for the parent", client(port))
    report(
        child=child_report,
        parent={"in_flight": in_flight, "counted": operation_counts(registry)},
    )


def while_another_thread_waits(port: int) -> None:
    """Fork while other threads of the parent are in calls."""
    tracedstore.configure(registry=registry, log_format="off")
    over_tcp, hashed = (
        tracedstore.wrap(client(port)),
        tracedstore.wrap(dist.HashStore()),
    )
    results = [
        in_background(lambda: over_tcp.get("k")),
        in_background(lambda: hashed.get("k")),
    ]
    wait_until(lambda: len(tracedstore.in_flight()) == 2)

    def child() -> dict[str, Any]:
        in_flight = len(tracedstore.in_flight())
        gauges = {
            kind: registry.get_sample_value(
                "tracedstore_operations_in_flight", {"store": kind, "operation": "get"}
            )
            or 0
            for kind in ("tcp_store", "hash_store")
        }
        own = tracedstore.wrap(client(port))
        own.add("n", 1)
        return {
            "in_flight": in_flight,
            "gauges": gauges,
            "counted": operation_counts(registry),
        }

    child_report = forked(child)
    in_flight = len(tracedstore.in_flight())
    client(port).set("k", "v")
    hashed.set("k", "v")
    values = [result.result(60).decode() for result in results]
    report(
        child=child_report,
        parent={
            "in_flight": in_flight,
            "values": values,
            "counted": operation_counts(registry),
        },
    )


def fail(store: tracedstore.TracedStore) -> bool:
    """Make a call that times out, which emits an event."""
    with suppress(RuntimeError):
        store.wait(["never"], timedelta(milliseconds=1))
    return True


class BlockingStream(io.TextIOBase):
    """A standard error that blocks writes, as a full pipe without a reader does."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        """Block until released, and write nothing."""
        self.entered.set()
        assert self.released.wait(60)
        return len(text)


def while_another_thread_logs() -> None:
    """Fork while another thread is blocked in writing an event."""
    sys.stderr = stream = BlockingStream()
    tracedstore.configure(registry=registry, log_format="json")
    store = tracedstore.wrap(dist.HashStore())
    logging = in_background(lambda: fail(store))
    assert stream.entered.wait(60)
    was_blocked = not logging.done()

    def child() -> bool:
        stream.released.set()
        return fail(store)

    try:
        child_result = forked(child, timeout=8)
    except AssertionError as error:
        child_result = str(error)
    stream.released.set()
    report(was_blocked=was_blocked, child=child_result, parent=logging.result(60))


SITUATIONS: dict[str, Callable[..., None]] = {
    "with_running_watcher": with_running_watcher,
    "while_another_thread_waits": while_another_thread_waits,
    "while_another_thread_logs": while_another_thread_logs,
}

SITUATIONS[sys.argv[1]](*map(int, sys.argv[2:]))
