"""Shared by the benchmarks: a TCPStore server, a span exporter, bars and results."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

import tracedstore


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value and its limit.

    Attributes:
        what: What was measured.
        value: The measured value.
        bar: The limit.
        held: Whether the value is within the limit.
    """

    what: str
    value: float
    bar: float
    held: bool

    @classmethod
    def at_most(cls, what: str, value: float, bar: float) -> "Bar":
        """Compare a value with its upper limit."""
        return cls(what, value, bar, value <= bar)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser of the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--output", type=Path, help="write the results as JSON")
    return options


def finish(bars: list[Bar], results: dict[str, Any], output: Path | None) -> int:
    """Print the bars, write the results as JSON, and return the exit code."""
    for bar in bars:
        mark = "ok  " if bar.held else "MISS"
        print(f"{mark} {bar.what}: {bar.value:g} (bar {bar.bar:g})")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        written = {
            "versions": {
                "tracedstore": tracedstore.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "cores": os.cpu_count(),
            **results,
            "bars": {
                bar.what: {"value": bar.value, "bar": bar.bar, "held": bar.held}
                for bar in bars
            },
        }
        output.write_text(json.dumps(written, indent=2) + "\n")
    return 0 if all(bar.held for bar in bars) else 1


class _DiscardingExporter(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:  # noqa: ARG002 - the interface's signature
        return SpanExportResult.SUCCESS


def discarding_provider() -> TracerProvider:
    """Create a TracerProvider as a job has it, whose exporter discards the spans."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_DiscardingExporter()))
    return provider


_SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore(
    "127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv"
)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def tcp_server(*, libuv: bool = True) -> Iterator[int]:
    """Serve a TCPStore from another process, and yield its port.

    Args:
        libuv: With torch's newer backend, which is its default.
    """
    backend = "libuv" if libuv else "TCP"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER, backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@contextmanager
def discarded_standard_error() -> Iterator[None]:
    """Discard standard error: torch warns about each connection and each timeout."""
    sys.stderr.flush()
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)
