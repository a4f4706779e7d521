"""Measures the size and the duration of one scrape of one rank, over HTTP.

It measures an ordinary rank, and a rank whose job does everything that makes an
exposition grow: every operation on every kind of store, keys and prefixes that never
repeat, many types of errors, and barriers with a thousand missing ranks. A Prometheus
server that scrapes a thousand ranks receives a thousand such pages.
"""

import socket
import statistics
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from harness import Bar, finish, parser
from prometheus_client import CollectorRegistry

import tracedstore
from tracedstore.core.barrier_stats import StalledBarrier
from tracedstore.core.recorder import RECORDER
from tracedstore.export import pages
from tracedstore.testing import FlakyStore

_FORMATS = {"text": "text/plain", "OpenMetrics": "application/openmetrics-text"}
# Bytes that a Prometheus server accepts without a changed configuration.
_MAX_SIZE = 10_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one kind of rank in one format."""

    rank: str
    format: str
    series: int
    size: int
    milliseconds: float


def ordinary() -> None:
    """Do what a rank does at its start and at every step."""
    store = tracedstore.wrap(dist.HashStore())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for step in range(100):
        tracedstore.barrier(store, 1, f"step/{step}", rank=0)
    dist.destroy_process_group()


def everything() -> None:
    """Do everything that makes an exposition grow."""
    for kind in range(20):
        store: Any = FlakyStore()
        store.__class__ = type(f"Kind{kind}Store", (FlakyStore,), {})
        store = tracedstore.wrap(store)
        for name in range(100):
            error = type(f"Error{name}", (Exception,), {})()
            store.fail("get", error)
            with suppress(type(error)):
                store.get("k")
            store.set(_word(name), "v")
    for name in range(200):
        tracedstore.barrier(dist.HashStore(), 1, _word(name), rank=0)
        RECORDER.barriers.record_stall(
            RECORDER.barriers.begin(),
            StalledBarrier(
                family=RECORDER.families.of(_word(name)),
                arrived=1,
                missing={rank: f"node{rank}" for rank in range(1, 1024)},
                possible=0,
            ),
        )


def _word(number: int) -> str:
    # Letters, because digits are replaced by `*` in the key family.
    return "".join(chr(ord("a") + int(digit)) for digit in str(number)) + "/k"


def measure(rank: str, url: str, times: int) -> list[Row]:
    """Scrape in both formats alternately, and return the medians."""
    durations: dict[str, list[float]] = {name: [] for name in _FORMATS}
    bodies: dict[str, bytes] = {}
    for _ in range(times):
        for name, accept in _FORMATS.items():
            request = urllib.request.Request(url, headers={"Accept": accept})
            started = time.perf_counter()
            with urllib.request.urlopen(request, timeout=60) as response:
                bodies[name] = response.read()
            durations[name].append((time.perf_counter() - started) * 1e3)
    return [
        Row(
            rank,
            name,
            sum(not line.startswith(b"#") for line in bodies[name].splitlines()),
            len(bodies[name]),
            statistics.median(durations[name]),
        )
        for name in _FORMATS
    ]


def main() -> int:
    """Run the benchmark, print the table, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--times", type=int, default=30)
    options = arguments.parse_args()
    # Every scrape renders the page; otherwise a page is reused for half a second.
    pages._METRICS_MAX_AGE = 0.0  # noqa: SLF001 - not a setting, because no job needs it
    rows = []
    for name, work in (("ordinary", ordinary), ("everything", everything)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        tracedstore.configure(
            registry=CollectorRegistry(), http_port=port, log_format="off"
        )
        work()
        rows += measure(name, f"http://127.0.0.1:{port}/metrics", options.times)
        tracedstore.shutdown()
    print(f"{'rank':<12}{'format':<14}{'series':>8}{'bytes':>12}{'per scrape':>14}")
    for row in rows:
        print(
            f"{row.rank:<12}{row.format:<14}{row.series:>8}{row.size:>12,}"
            f"{row.milliseconds:>11.1f} ms"
        )
    largest = max(row.size for row in rows)
    bars = [Bar.at_most("bytes of the largest exposition", largest, _MAX_SIZE)]
    return finish(bars, {"rows": [asdict(row) for row in rows]}, options.output)


if __name__ == "__main__":
    sys.exit(main())
