"""Ranks as real processes, forked on demand, that meet at a barrier.

Arguments: the kind of store, and where it is. Each line on standard input starts a
rank, or kills one; each rank reports its process id, and how its barrier went.
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
from torch.distributed.elastic.utils import store as torchs

import tracedstore
from integration.harness import report


def connect(kind: str, where: str) -> Any:
    """Make a rank's own store."""
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", int(where), None, is_master=False)
    if kind == "file":
        return dist.FileStore(where, -1)
    port, prefix = where.split(",")
    return EtcdStore(etcd.Client(host="127.0.0.1", port=int(port)), prefix)


def trace_into(path: str) -> TracerProvider:
    """Write spans to a file, a line each; in batches, as a job does."""
    exporter = ConsoleSpanExporter(
        out=Path(path).open("a"),  # noqa: SIM115 - for the life of the process
        formatter=lambda span: str(span.to_json(indent=None)) + "\n",
    )
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracedstore.configure(log_format="json", tracer_provider=provider)
    return provider


def in_span(provider: TracerProvider | None, name: str | None) -> Any:
    """Be in a trace of the caller's own, if there is one."""
    if provider is None or name is None:
        return nullcontext()
    return provider.get_tracer("job").start_as_current_span(name)


def take_part(command: dict[str, Any]) -> None:
    """Be one rank at one barrier."""
    provider = trace_into(command["spans"]) if "spans" in command else None
    store = connect(sys.argv[1], sys.argv[2])
    if command["flavour"] == "traced":
        store = tracedstore.wrap(store)
    plain = command["flavour"] == "torch"
    rank, timeout = command["rank"], store.timeout
    facts: dict[str, Any] = {"rank": rank, "prefix": command["prefix"]}
    try:
        with in_span(provider, command.get("caller")):
            (torchs.barrier if plain else tracedstore.barrier)(
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
        facts |= {"result": "completed"}
        if provider is not None:
            # Only here: a timeout has to be exported before it is raised.
            provider.shutdown()
    except tracedstore.BarrierTimeout as error:
        facts |= {
            "result": "timeout",
            "missing": error.missing_ranks,
            "names": error.missing_names,
            "arrived": error.arrived_ranks,
            "unidentified": error.unidentified_count,
            "duplicates": error.duplicate_ranks,
            "text": str(error),
        }
    except Exception as error:
        facts |= {"result": type(error).__name__, "text": str(error)}
    report(**facts, timeout_kept=plain or store.timeout == timeout)


def main() -> None:
    """Do as told, until nobody tells anything any more."""
    tracedstore.configure(log_format="json")
    report(ready=True)
    for line in sys.stdin:
        given = json.loads(line)
        if "kill" in given:
            os.kill(given["kill"], signal.SIGKILL)
            os.waitpid(given["kill"], 0)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                take_part(given)
            finally:
                os._exit(0)
        report(started=given["rank"], prefix=given["prefix"], pid=pid)


if __name__ == "__main__":
    main()
