"""Measures the size and the duration of one scrape of one rank, over HTTP.

It measures a rank of an ordinary job: DistributedDataParallel over gloo with another
process, barriers at steps and checkpoints, and a TCPStore that is used. The same rank
with `TRACEDSTORE_METRICS=full`. And a rank whose job does everything that makes an
exposition grow: every operation on every kind of store, keys and prefixes that never
repeat, many types of errors, and barriers with a thousand missing ranks. A Prometheus
server that scrapes a thousand ranks receives a thousand such pages.
"""

import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import Bar, finish, parser
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from torch.nn.parallel import DistributedDataParallel

import tracedstore
from tracedstore.coordination.arrivals import StalledBarrier
from tracedstore.export import http_endpoint
from tracedstore.recording.recorder import RECORDER
from tracedstore.testing import FlakyStore

# What Prometheus accepts, in its own words.
_FORMATS = {
    "text": "text/plain;version=0.0.4",
    "OpenMetrics": "application/openmetrics-text;version=1.0.0",
}
# What an ordinary rank may cost: series, bytes, and milliseconds to render the page.
_MAX_ORDINARY = (100, 15_000, 3.0)
_STEPS = 20
# Bytes that a Prometheus server accepts without a changed configuration.
_MAX_SIZE = 10_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one kind of rank in one format.

    Attributes:
        rank: What its job does.
        format: The format of the page.
        series: The samples on the page, prometheus_client's own included.
        size: Its bytes.
        rendering: Milliseconds of CPU time to render it.
        milliseconds: Milliseconds of a scrape.
    """

    rank: str
    format: str
    series: int
    size: int
    rendering: float
    milliseconds: float


def ordinary() -> None:
    """Run rank 0 of an ordinary job in this process, and rank 1 in another one."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = [sys.executable, "-W", "ignore", __file__, "--peer-port", str(server.port)]
    with subprocess.Popen(peer) as other:
        try:
            train(server, 0)
            code = other.wait(60)
        finally:
            # After SIGTERM it would wait for rank 0, and this process for it.
            other.kill()
    if code != 0:
        raise RuntimeError("rank 1 failed")


def train(server: dist.Store, rank: int) -> None:
    """Do what a rank does at its start, at every step and at checkpoints."""
    store: Any = tracedstore.wrap(server)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        store.set(f"loss/{rank}/{step}", str(loss.item()))
        store.get(f"loss/{1 - rank}/{step}")
        store.add("steps", 1)
        if not store.check([f"stop/{step}"]) and step % 5 == 0:
            store.compare_set(f"writer/{step}", "", str(rank))
            tracedstore.barrier(store, 2, f"checkpoint/{step}", rank=rank)
        tracedstore.barrier(store, 2, f"step/{step}", rank=rank)
        dist.barrier()
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
        RECORDER.cold.begin(
            name,
            StalledBarrier(
                family=RECORDER.cold.label_value("barrier", _word(name)),
                arrived=1,
                missing={rank: f"node{rank}" for rank in range(1, 1024)},
                possible=0,
            ),
        )


def _word(number: int) -> str:
    # Letters, because digits are replaced by `*` in the key family.
    return "".join(chr(ord("a") + int(digit)) for digit in str(number)) + "/k"


def measure(rank: str, url: str, registry: CollectorRegistry, times: int) -> list[Row]:
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
            _rendering(name, registry, times),
            statistics.median(durations[name]),
        )
        for name in _FORMATS
    ]


def _rendering(name: str, registry: CollectorRegistry, times: int) -> float:
    render, _ = choose_encoder(_FORMATS[name])
    durations = []
    for _ in range(times):
        # Of this thread: other processes on the machine do not count.
        started = time.thread_time()
        render(registry)
        durations.append((time.thread_time() - started) * 1e3)
    return statistics.median(durations)


def main() -> int:
    """Run the benchmark, print the table, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--times", type=int, default=30)
    arguments.add_argument("--peer-port", type=int, help="run rank 1 of a job instead")
    options = arguments.parse_args()
    if options.peer_port is not None:
        tracedstore.configure(log_format="off")
        train(dist.TCPStore("127.0.0.1", options.peer_port, is_master=False), 1)
        return 0
    # Every scrape renders the page; otherwise a page is reused for half a second.
    http_endpoint._METRICS_MAX_AGE = 0.0  # noqa: SLF001 - not a setting, because no job needs it
    rows = []
    for name, work, metrics in (
        ("ordinary", ordinary, "compact"),
        ("ordinary, full", lambda: None, "full"),
        ("everything", everything, "compact"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        tracedstore.configure(http_port=port, log_format="off", metrics=metrics)
        work()
        url = f"http://127.0.0.1:{port}/metrics"
        rows += measure(name, url, REGISTRY, options.times)
        tracedstore.shutdown()
    print(
        f"{'rank':<16}{'format':<14}{'series':>8}{'bytes':>12}{'rendering':>14}"
        f"{'per scrape':>14}"
    )
    for row in rows:
        print(
            f"{row.rank:<16}{row.format:<14}{row.series:>8}{row.size:>12,}"
            f"{row.rendering:>11.1f} ms{row.milliseconds:>11.1f} ms"
        )
    pages_of_ordinary = [row for row in rows if row.rank == "ordinary"]
    measured = (
        ("series of an ordinary rank", max(one.series for one in pages_of_ordinary)),
        ("bytes of its page", max(one.size for one in pages_of_ordinary)),
        ("milliseconds to render it", max(one.rendering for one in pages_of_ordinary)),
    )
    bars = [
        *(
            Bar.at_most(what, value, bar)
            for (what, value), bar in zip(measured, _MAX_ORDINARY, strict=True)
        ),
        Bar.at_most(
            "bytes of the largest exposition", max(row.size for row in rows), _MAX_SIZE
        ),
    ]
    return finish(bars, {"rows": [asdict(row) for row in rows]}, options.output)


if __name__ == "__main__":
    sys.exit(main())
