"""Fork, in some situation. Arguments: which one, a TCPStore's port if it needs one."""

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
    all_counted,
    forked,
    in_background,
    report,
    wait_until,
)

registry = CollectorRegistry()
errors = io.StringIO()


def client(port: int) -> dist.TCPStore:
    """A connection of its own."""
    return dist.TCPStore("127.0.0.1", port, None, is_master=False)


def stalled_here(key: str) -> bool:
    """Tell whether a blocked call is warned of, as one of this very process."""
    told = [json.loads(line) for line in errors.getvalue().splitlines(keepends=True)]
    return ("store.operation.stalled", key, os.getpid()) in [
        (event["event"], event.get("key"), event["pid"]) for event in told
    ]


def watched(store: tracedstore.TracedStore, key: str, setter: dist.Store) -> int:
    """Block in a call until the stall watch tells of it; give the calls in flight."""
    answer = in_background(lambda: store.get(key))
    wait_until(lambda: stalled_here(key))
    in_flight = len(tracedstore.in_flight())
    setter.set(key, "at last")
    assert answer.result(15) == b"at last"
    return in_flight


def with_a_running_watch(port: int) -> None:
    """The parent has stores and a stall watch; the child uses what it can."""
    sys.stderr = errors
    tracedstore.configure(registry=registry, stall_after=0.2, log_format="json")
    over_tcp, hashed = (
        tracedstore.wrap(client(port)),
        tracedstore.wrap(dist.HashStore()),
    )
    over_tcp.set("whose", "parent's")
    hashed.set("whose", "parent's")
    assert "tracedstore-stall-watch" in {t.name for t in threading.enumerate()}

    def child() -> dict[str, Any]:
        at_first = all_counted(registry)
        threads = [thread.name for thread in threading.enumerate()]
        inherited = hashed.get("whose").decode()
        hashed.set("whose", "child's")
        own = tracedstore.wrap(client(port))
        read = own.get("whose").decode()
        in_flight = watched(own, "for the child", client(port))
        return {
            "at_first": at_first,
            "threads": threads,
            "inherited": inherited,
            "read": read,
            "in_flight": in_flight,
            "counted": all_counted(registry),
        }

    of_child = forked(child)
    assert hashed.get("whose") == b"parent's"
    assert over_tcp.get("whose") == b"parent's"
    in_flight = watched(over_tcp, "for the parent", client(port))
    report(
        child=of_child,
        parent={"in_flight": in_flight, "counted": all_counted(registry)},
    )


def while_another_thread_waits(port: int) -> None:
    """A thread of the parent is in a call that the child knows nothing of."""
    tracedstore.configure(registry=registry, log_format="off")
    over_tcp, hashed = (
        tracedstore.wrap(client(port)),
        tracedstore.wrap(dist.HashStore()),
    )
    answers = [
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
            for kind in ("tcp_store", "hash_store")
        }
        own = tracedstore.wrap(client(port))
        own.add("n", 1)
        return {
            "in_flight": in_flight,
            "gauges": gauges,
            "counted": all_counted(registry),
        }

    of_child = forked(child)
    in_flight = len(tracedstore.in_flight())
    client(port).set("k", "v")
    hashed.set("k", "v")
    values = [answer.result(15).decode() for answer in answers]
    report(
        child=of_child,
        parent={
            "in_flight": in_flight,
            "values": values,
            "counted": all_counted(registry),
        },
    )


def fail(store: tracedstore.TracedStore) -> bool:
    """Make a call that times out, which is an event."""
    with suppress(RuntimeError):
        store.wait(["never"], timedelta(milliseconds=1))
    return True


class Stuck(io.TextIOBase):
    """Standard error that takes its time, as a pipe does that nobody reads."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        """Write nothing, slowly."""
        self.begun.set()
        assert self.released.wait(15)
        return len(text)


def while_another_thread_logs() -> None:
    """Nobody reads standard error for a while, and a thread is stuck in an event."""
    sys.stderr = stuck = Stuck()
    tracedstore.configure(registry=registry, log_format="json")
    store = tracedstore.wrap(dist.HashStore())
    logging = in_background(lambda: fail(store))
    assert stuck.begun.wait(15)
    was_stuck = not logging.done()

    def child() -> bool:
        stuck.released.set()
        return fail(store)

    try:
        of_child = forked(child, timeout=8)
    except AssertionError as error:
        of_child = str(error)
    stuck.released.set()
    report(was_stuck=was_stuck, child=of_child, parent=logging.result(15))


SITUATIONS: dict[str, Callable[..., None]] = {
    "with_a_running_watch": with_a_running_watch,
    "while_another_thread_waits": while_another_thread_waits,
    "while_another_thread_logs": while_another_thread_logs,
}

SITUATIONS[sys.argv[1]](*map(int, sys.argv[2:]))
