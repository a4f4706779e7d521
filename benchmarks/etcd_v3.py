"""Measures EtcdV3Store against torch's EtcdStore (v2) on one etcd, in turns.

The server is etcd 3.5 with both APIs, on this machine. Clients are threads in several
processes. Exits with 1 if a bar is missed.
"""

import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import etcd
from harness import Bar, finish, parser
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from tracedstore.etcd import EtcdV3Store
from tracedstore.tools.demo.store_servers import serve_store

_KEYS = 5_000
_TIMEOUT = timedelta(seconds=120)
# Seconds after which all clients have sent their requests and wait.
_SETTLE_SECONDS = 4.0
# The first call after one of the other store finds cold caches.
_CALLS_PER_TURN = 5
_CONTEXT = multiprocessing.get_context("fork")
# What is at most v3 / v2.
BARS = {
    "get at 1 key": 1.4,
    "get at 5,000 keys": 0.06,
    "check at 5,000 keys": 0.06,
    "add": 0.6,
    "barrier of 64 clients, last one out": 0.2,
    "256 waiters on one key, last woken": 0.2,
}


@dataclass(frozen=True)
class Row:
    """Medians of both stores, in milliseconds."""

    name: str
    v2_ms: float
    v3_ms: float

    @property
    def ratio(self) -> float:
        """The duration of v3 divided by that of v2."""
        return self.v3_ms / self.v2_ms


def connect(generation: str, port: int, name: str) -> Any:
    """Return a store of either generation."""
    if generation == "v3":
        return EtcdV3Store(f"127.0.0.1:{port}", name, timeout=_TIMEOUT)
    client = etcd.Client(host="127.0.0.1", port=port, allow_reconnect=False)
    return EtcdStore(client, f"/{name}", _TIMEOUT)


def in_turns(name: str, repeats: int, calls: dict[str, Callable[[], Any]]) -> Row:
    """Call both stores in turns of a few calls, and return the medians."""
    durations: dict[str, list[float]] = {generation: [] for generation in calls}
    for _ in range(repeats // _CALLS_PER_TURN):
        for generation, call in calls.items():
            for _ in range(_CALLS_PER_TURN):
                started = time.perf_counter()
                call()
                durations[generation].append(time.perf_counter() - started)
    return Row(
        name, *(1e3 * median(durations[generation]) for generation in ("v2", "v3"))
    )


def single_calls(port: int, repeats: int) -> list[Row]:
    """Measure calls of one client."""
    stores = {each: connect(each, port, "bench-one") for each in ("v2", "v3")}
    full = {each: connect(each, port, "bench-many") for each in ("v2", "v3")}
    for store in stores.values():
        store.set("k", "v")
    # python-etcd's set takes a millisecond.
    for number in range(_KEYS):
        full["v2"].set(f"k{number}", "v")
    full["v3"].multi_set([f"k{n}" for n in range(_KEYS)], ["v"] * _KEYS)

    def calls(chosen: dict[str, Any], call: Callable[[Any], Any]) -> dict[str, Any]:
        return {
            each: (lambda store=store: call(store)) for each, store in chosen.items()
        }

    some = max(_CALLS_PER_TURN, repeats // 2)
    return [
        in_turns("get at 1 key", repeats, calls(stores, lambda s: s.get("k"))),
        in_turns("get at 5,000 keys", some, calls(full, lambda s: s.get("k77"))),
        in_turns("check at 5,000 keys", some, calls(full, lambda s: s.check(["k77"]))),
        in_turns("add", repeats, calls(stores, lambda s: s.add("n", 1))),
    ]


def meet(store: Any, key: str, clients: int) -> None:
    """Wait at a barrier of torch's kind."""
    if store.add(f"{key}/n", 1) == clients:
        store.set(f"{key}/done", "1")
    store.get(f"{key}/done")


def wait(store: Any, key: str, _clients: int) -> None:
    """Wait for one key."""
    store.get(key)


def _clients(
    port: int, generation: str, work: Any, threads: int, clients: int, pipe: Any
) -> None:
    """Run the threads of one process; each round is a key from the parent."""
    stores = [connect(generation, port, "bench-clients") for _ in range(threads)]
    while (key := pipe.recv()) is not None:
        ended = [0.0] * threads

        def run(number: int, key: str = key, ended: list[float] = ended) -> None:
            work(stores[number], key, clients)
            ended[number] = time.time()

        running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
        for thread in running:
            thread.start()
        pipe.send("started")
        for thread in running:
            thread.join()
        pipe.send(max(ended))


def start_crowd(
    generation: str, port: int, work: Any, processes: int, threads: int
) -> list[Any]:
    """Start the processes of many clients; return a pipe to each."""
    clients = processes * threads
    # Each rank of a job has a key: its address.
    store = connect(generation, port, "bench-clients")
    for number in range(clients):
        store.set(f"address/{number}", "127.0.0.1:29500")
    pipes = []
    for _ in range(processes):
        own, other = _CONTEXT.Pipe()
        arguments = (port, generation, work, threads, clients, other)
        _CONTEXT.Process(target=_clients, args=arguments, daemon=True).start()
        pipes.append(own)
    return pipes


def crowd(
    name: str, port: int, work: Any, processes: int, threads: int, rounds: int
) -> Row:
    """Measure the last of many clients, in several processes."""
    crowds = {
        generation: start_crowd(generation, port, work, processes, threads)
        for generation in ("v2", "v3")
    }
    seconds: dict[str, list[float]] = {"v2": [], "v3": []}
    for number in range(rounds):
        for generation, ends in crowds.items():
            key, started = f"{work.__name__}-{number}", time.time()
            for end in ends:
                end.send(key)
            for end in ends:
                end.recv()
            if work is wait:
                time.sleep(_SETTLE_SECONDS)
                started = time.time()
                connect(generation, port, "bench-clients").set(key, "v")
            seconds[generation].append(max(end.recv() for end in ends) - started)
    for ends in crowds.values():
        for end in ends:
            end.send(None)
    return Row(name, *(1e3 * median(seconds[each]) for each in ("v2", "v3")))


def main() -> int:
    """Run the benchmark, print the table, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=150)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_store("etcd-v2", Path(folder)) as location,
    ):
        port = int(location)
        barrier, waiters = list(BARS)[4:]
        rows = [
            crowd(barrier, port, meet, 8, 8, options.rounds),
            crowd(waiters, port, wait, 4, 64, options.rounds),
            *single_calls(port, options.repeats),
        ]
    print(f"{'':<40}{'v2':>12}{'v3':>12}")
    for row in rows:
        print(
            f"{row.name:<40}{row.v2_ms:>10.2f}ms{row.v3_ms:>10.2f}ms{row.ratio:>7.3f}x"
        )
    bars = [Bar.at_most(f"{r.name}: v3 / v2", r.ratio, BARS[r.name]) for r in rows]
    return finish(bars, {"rows": [asdict(row) for row in rows]}, options.output)


if __name__ == "__main__":
    sys.exit(main())
