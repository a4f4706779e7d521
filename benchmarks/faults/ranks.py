"""A rank of a case: connects, waits for its release, calls, and reports the result."""

import atexit
import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from faults import actions
from faults.cases import Case
from faults.processes import Channel
from faults.stores import RENDEZVOUS_STORE_TIMEOUT, Script, connect
from tracedstore.common.threads import join_bounded_threads
from tracedstore.recording.watcher import WATCHER
from tracedstore.rendezvous.handlers import create

# Seconds to write events and export spans at exit: the default, and less where the
# exporter uses it up.
_EXIT_TIMEOUT, _EXIT_TIMEOUT_EXPORTER = 5.0, 2.0
_STALL_AFTER = 0.5
# Seconds for reports in progress to end, before counts are compared.
_QUIET_TIMEOUT = 5.0
_METRICS_OF = {"tcp": "tcp_store", "file": "file_store", "etcd": "etcd_store"}
_ETCD_METHODS = ("add", "wait", "set")
# Faults after which not every call can be counted.
_UNCOUNTED = ("limit_memory",)


class _Exporter(InMemorySpanExporter):
    """Announces the first export as a step."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        super().__init__()
        self._announce = announce

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._announce("exporting")
        return super().export(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the ranks of a case share.

    Attributes:
        folder: The folder of the case.
        address: The address of the store.
        proxy: The same through the proxy.
        collector: The port of the OTLP endpoint.
    """

    folder: Path
    address: str
    proxy: str = ""
    collector: int = 0


def log_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's standard error."""
    return folder / f"rank{rank}.log"


def run(case: Case, rank: int, channel: Channel, where: Surroundings) -> NoReturn:
    """Run one rank in this process, and end it."""
    _open_log(case, rank, where.folder)
    faults = case.faults_of(rank)

    def announce(step: str) -> None:
        channel.send("step", step=step)
        if step in faults:
            actions.inject(faults[step], channel)

    script = Script(announce, case.prefix, rank)
    port = _configure(case, where, script)
    address = where.proxy if rank in case.proxied else where.address
    store = connect(case.store, address, script)
    if case.protocol == "rendezvous":
        store.set_timeout(timedelta(seconds=RENDEZVOUS_STORE_TIMEOUT))
    channel.send("ready", port=port)
    channel.wait()
    script.announce("start")
    call = _rendezvous if case.protocol == "rendezvous" else _barrier
    result = call(case, rank, store)
    result["ended"] = time.monotonic()
    actions.lift_limits()
    counts = {}
    if not any(fault.action in _UNCOUNTED for fault in faults.values()):
        counts = _counts(case, rank, script, result)
    channel.send("result", **result, counts=counts)
    if rank in case.exits:
        # Not SystemExit, which unwinds the frames of the director below this one.
        ctypes.pythonapi.Py_Exit(0)
    # What an exit runs, without the half second that finalizing torch takes.
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as Py_Finalize does
    atexit._run_exitfuncs()  # noqa: SLF001 - as Py_Finalize does
    os._exit(0)


def _open_log(case: Case, rank: int, folder: Path) -> None:
    """Open standard error as the case has it."""
    if case.log == "full_pipe":
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for size in (4096, 1):
            try:
                while True:
                    os.write(writing, b"x" * size)
            except BlockingIOError:
                pass
        os.set_blocking(writing, True)
        os.dup2(writing, 2)
        os.set_inheritable(reading, True)  # stays open: nothing reads it
        return
    if case.log == "broken_pipe":
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        return
    if case.log == "none":
        # What Python does in a process that starts without standard error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        vars(sys)["stderr"] = None
        return
    path = "/dev/full" if case.log == "dev_full" else log_path(folder, rank)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    if case.log == "too_large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _configure(case: Case, where: Surroundings, script: Script) -> int | None:
    """Configure tracedstore; return the port of the metrics endpoint."""
    registry = CollectorRegistry()
    actions.use_registry(registry)
    settings: dict[str, Any] = {}
    if case.exporter:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = (
            f"http://127.0.0.1:{where.collector}"
        )
        settings["tracing"] = True
    elif case.spans:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(_Exporter(script.announce)))
        settings["tracer_provider"] = provider
    if case.http_clients >= 0:
        settings["http_port"] = 0
    tracedstore.configure(
        registry=registry,
        log_format="json",
        stall_after=_STALL_AFTER,
        exit_timeout=_EXIT_TIMEOUT_EXPORTER if case.exporter else _EXIT_TIMEOUT,
        **settings,
    )
    if case.http_clients < 0:
        return None
    from tracedstore.export import setup  # noqa: PLC0415 - its state, after configure()

    telemetry: Any = setup._process.telemetry  # noqa: SLF001 - no public name has the port
    return int(telemetry._endpoint._server.port)  # noqa: SLF001


def _barrier(case: Case, rank: int, store: Any) -> dict[str, Any]:
    flavour = case.flavours[rank]
    if flavour == "traced":
        store = tracedstore.wrap(store)
    barrier: Any = torch_store.barrier
    options: dict[str, Any] = {}
    if flavour != "torch":
        barrier, options = tracedstore.barrier, {"warn_after": case.warn_after}
    try:
        barrier(
            store,
            case.world_size,
            case.prefix,
            case.timeout,
            rank=rank,
            trace_timeout=case.trace_timeout,
            **options,
        )
    except tracedstore.BarrierTimeout as error:
        return {
            "outcome": "timeout",
            "missing": error.missing_ranks,
            "possibly": error.possibly_missing_ranks,
            "duplicates": error.duplicate_ranks,
        }
    except Exception as error:
        # torch's barrier raises another text than the store.
        timed_out = flavour == "torch" and type(error) is dist.DistStoreError
        text = f"{type(error).__name__}: {str(error)[:200]}"
        return {"outcome": "timeout" if timed_out else "failed", "error": text}
    return {"outcome": "completed"}


def _rendezvous(case: Case, rank: int, store: Any) -> dict[str, Any]:
    params = RendezvousParameters(
        "traced-c10d",
        "127.0.0.1:29400",
        case.prefix,
        case.min_nodes,
        case.world_size,
        local_addr=node_address(rank),
        join_timeout=int(case.timeout),
        last_call_timeout=1,
        warn_after=case.warn_after,
    )
    handler = None
    try:
        handler = create(
            params, lambda p: (C10dRendezvousBackend(store, p.run_id), store), 29400
        )
        info = handler.next_rendezvous()
    except RendezvousTimeoutError as error:
        return {"outcome": "timeout", "error": str(error)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:200]
        return {"outcome": "failed", "error": text, "began": handler is not None}
    return {"outcome": "completed", "world": info.world_size, "rank": info.rank}


def node_address(rank: int) -> str:
    """Return the address of a node: each has its own loopback address."""
    return f"127.0.0.{rank + 1}"


def _counts(
    case: Case, rank: int, script: Script, result: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """Return what happened and what tracedstore counted, by name."""
    # A report that the watcher has begun goes on after the barrier has returned.
    WATCHER.stop(_QUIET_TIMEOUT)
    quiet = join_bounded_threads(_QUIET_TIMEOUT)
    counted = actions.counted(actions.tracedstore_registry())
    if case.protocol == "rendezvous":
        name = f"rendezvous {result['outcome']}"
        # A rendezvous whose backend cannot be created has not begun.
        return {name: (int(result.get("began", True)), counted.get(name, 0))}
    if case.flavours[rank] == "torch":
        return {}
    name = f"barriers {result['outcome']}"
    counts = {name: (1, counted.get(name, 0))}
    refused = any(f.action == "refuse_threads" for f in case.faults_of(rank).values())
    if case.log == "file" and not refused:
        counts["events dropped"] = (0, counted.get("events dropped", 0))
    # A call that the barrier abandoned is under way, and not counted yet.
    if case.flavours[rank] == "traced" and quiet and not tracedstore.in_flight():
        # An EtcdStore calls its own methods from C++ for the others.
        methods = _ETCD_METHODS if case.store == "etcd" else script.calls
        for method in methods:
            times = script.calls[method]
            label = f"{_METRICS_OF[case.store]}.{method}"
            counts[label] = (times, counted.get(label, 0))
    return counts
