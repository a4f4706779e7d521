"""Faults that a rank injects into its own process at a step."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import tracedstore
from faults.cases import Fault
from faults.processes import Channel
from tracedstore import names

_MEGABYTE = 2**20
_CALLS = tuple(f"{metric.name}_count" for metric in names.CALL_DURATIONS)
_wall, _wall_ns = time.time, time.time_ns


def inject(fault: Fault, channel: Channel) -> None:
    """Inject a fault into this process, or let the director inject it."""
    action = _IN_PROCESS.get(fault.action)
    if action is not None:
        action(fault, channel)
        return
    if fault.step == "waiting" and fault.action in ("kill", "stop"):
        # The director sends the signal while this process waits.
        channel.send("signal", action=fault.action)
        return
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "stop":
        channel.send("held", step=fault.step)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # A late rank waits here, and so does one whose server or connection fails.
    channel.send("held", step=fault.step)
    channel.wait()


def _set_clock(fault: Fault, _channel: Channel) -> None:
    """Set the wall clock, for what reads it from Python."""
    jump = fault.value

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz or UTC) + timedelta(seconds=jump)

    time.time = lambda: _wall() + jump
    time.time_ns = lambda: _wall_ns() + int(jump * 1e9)
    vars(dynamic_rendezvous)["datetime"] = Datetime


def _limit_memory(fault: Fault, _channel: Channel) -> None:
    status = Path("/proc/self/statm").read_text(encoding="ascii")
    used = int(status.split()[0]) * resource.getpagesize()
    limit = used + int(fault.value * _MEGABYTE)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _limit_file_size(_fault: Fault, _channel: Channel) -> None:
    # No file can grow: writes fail as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def lift_limits() -> None:
    """Lift the limits, so that the rank can report its result."""
    unlimited = resource.RLIM_INFINITY
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (unlimited, unlimited))


def _refuse_threads(_fault: Fault, _channel: Channel) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> int:
        raise RuntimeError("can't start new thread")

    vars(threading)["_start_new_thread"] = refuse


def _fork(fault: Fault, channel: Channel) -> None:
    if fault.step != "waiting":
        _fork_child(channel)
        return

    def fork_while_waiting() -> None:
        while not any(call.operation == "wait" for call in tracedstore.in_flight()):
            time.sleep(0.001)  # polls; only a traced store shows its calls
        _fork_child(channel)

    threading.Thread(target=fork_while_waiting, daemon=True).start()


def _fork_child(channel: Channel) -> None:
    """Fork a process that times out in a barrier of its own, and wait for it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            channel.send("child", **_child())
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    channel.send("child_ended", status=os.waitstatus_to_exitcode(ended))


def _child() -> dict[str, Any]:
    """Call a barrier in a forked process; its counts start from zero."""
    store = tracedstore.wrap(dist.HashStore())
    missing: tuple[int, ...] = ()
    try:
        tracedstore.barrier(store, 2, "forked", 0.05, rank=0, trace_timeout=0)
    except tracedstore.BarrierTimeout as timeout:
        missing = timeout.missing_ranks
    samples = counted(tracedstore_registry())
    return {
        "missing": list(missing),
        "counts": {
            "barriers": (1, samples.get("barriers timeout", 0)),
            "wait": (1, samples.get("hash_store.wait", 0)),
            "missing ranks": ([1], list(missing)),
        },
    }


# The registry of this rank; a child has the same one.
_registry: list[CollectorRegistry] = []


def use_registry(registry: CollectorRegistry) -> None:
    """Set the registry of this process."""
    _registry[:] = [registry]


def tracedstore_registry() -> CollectorRegistry:
    """Return the registry of this process."""
    return _registry[0]


def counted(registry: CollectorRegistry) -> dict[str, int]:
    """Return what tracedstore counted: calls by store and method, and barriers."""
    counts: dict[str, int] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = sample.labels
            if sample.name in _CALLS:
                name = f"{labels['store']}.{labels['operation']}"
            elif sample.name == "tracedstore_barrier_duration_seconds_count":
                name = f"barriers {labels['result']}"
            elif sample.name == "tracedstore_rendezvous_duration_seconds_count":
                name = f"rendezvous {labels['result']}"
            elif sample.name == "tracedstore_events_dropped_total":
                name = "events dropped"
            else:
                continue
            counts[name] = counts.get(name, 0) + int(sample.value)
    return counts


_IN_PROCESS: dict[str, Callable[[Fault, Channel], None]] = {
    "set_clock": _set_clock,
    "limit_memory": _limit_memory,
    "limit_file_size": _limit_file_size,
    "refuse_threads": _refuse_threads,
    "fork": _fork,
}
