"""Ranks as real processes, forked on demand, that call a barrier.

Arguments: the kind of store and its address. Each line on standard input is a command
that starts or kills a rank. Reports the process id of each rank and the outcome of its
barrier.
"""

import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import etcd
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from integration.harness import report


def connect(kind: str, address: str) -> Any:
    """Return a new store for a rank."""
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", int(address), None, is_master=False)
    if kind == "file":
        return dist.FileStore(address, -1)
    port, prefix = address.split(",")
    return EtcdStore(etcd.Client(host="127.0.0.1", port=int(port)), prefix)


def export_spans(path: str) -> TracerProvider:
    """Export spans to a file, one per line, in batches as a job does."""
    exporter = ConsoleSpanExporter(
        out=Path(path).open("a"),  # noqa: SIM115 - for the life of the process
        formatter=lambda span: str(span.to_json(indent=None)) + "\n",
    )
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracedstore.configure(log_format="json", tracer_provider=provider)
    return provider


def in_span(provider: TracerProvider | None, name: str | None) -> Any:
    """Return a context with a current span of the caller, if one is named."""
    if provider is None or name is None:
        return nullcontext()
    return provider.get_tracer("job").start_as_current_span(name)


def run_rank(command: dict[str, Any]) -> None:
    """Call one barrier as one rank, and report the outcome."""
    provider = export_spans(command["spans"]) if "spans" in command else None
    store = connect(sys.argv[1], sys.argv[2])
    if command["flavour"] == "traced":
        store = tracedstore.wrap(store)
    plain = command["flavour"] == "torch"
    rank, timeout = command["rank"], store.timeout
    fields: dict[str, Any] = {"rank": rank, "prefix": command["prefix"]}
    try:
        with in_span(provider, command.get("caller")):
            (torch_store.barrier if plain else tracedstore.barrier)(
                store,
                command["world_size"],
                command["prefix"],
                command["timeout"],
                rank=rank,
                rank_tracing_decoder=(lambda n: f"host{n}")
                if command["decode"]
                else None,
                trace_timeout=command["trace_timeout"],
                **({} if plain else {"warn_after": command["warn_after"]}),
            )
        fields |= {"result": "completed"}
        if provider is not None:
            # Not after a timeout, whose span the barrier exports before it raises.
            provider.force_flush()
            provider.shutdown()
    except tracedstore.BarrierTimeout as error:
        fields |= {
            "result": "timeout",
            "missing": error.missing_ranks,
            "names": error.missing_names,
            "arrived": error.arrived_ranks,
            "unidentified": error.unidentified_count,
            "duplicates": error.duplicate_ranks,
            "text": str(error),
        }
    except Exception as error:
        fields |= {"result": type(error).__name__, "text": str(error)}
    report(**fields, timeout_kept=plain or store.timeout == timeout)


def main() -> None:
    """Run commands until standard input is closed."""
    tracedstore.configure(log_format="json")
    report(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "kill" in command:
            os.kill(command["kill"], signal.SIGKILL)
            os.waitpid(command["kill"], 0)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(command)
            finally:
                os._exit(0)
        report(started=command["rank"], prefix=command["prefix"], pid=pid)


if __name__ == "__main__":
    main()
