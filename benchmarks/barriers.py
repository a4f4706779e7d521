"""What a barrier costs: ours against torch's own, interleaved in one run.

A completed barrier: ranks are threads, each with a connection of its own, in a few
processes, and all come at the same moment. Timed is from the first that comes to the
last that leaves. Round trips are counted on the wire, apart from the timing. Each rank
registers itself in its first barrier on a connection; that one is counted, not timed.

Naming the missing: timed is from the timeout to the exception that has their names.
The others' arrivals are in the store, written by the code that ranks run; for torch's
own the keys its scan waits for.

Nothing is configured, as in a job that only calls the barrier; "configured" is with
structlog and a TracerProvider. Exits with 1 where a bar is missed.
"""

import multiprocessing
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import structlog
import torch.distributed as dist
from harness import Bar, finish, parser, provider_to_nowhere, tcp_server
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torchs
from wire import CountingStore, Relay, relay

import tracedstore
from tracedstore.coordination import arrivals, rank_registry
from tracedstore.coordination.protocol import BarrierKeys

WORLDS = (2, 16, 64, 256)
PROCESSES = 4
MOST_ROUND_TRIPS_MORE = 1
LARGE_WORLDS = (1024, 16_384)
MOST_NAMING_RATIO = 0.01
_TRACE_TIMEOUT = 0.1
# Time for all ranks to be told, and to be waiting for the moment to come.
_NOTICE = 0.02

VARIANTS: dict[str, Callable[[Any, int, str, int], None]] = {
    "torch": lambda store, world, prefix, rank: torchs.barrier(
        store, world, prefix, 60, rank=rank
    ),
    "ours": lambda store, world, prefix, rank: tracedstore.barrier(
        store, world, prefix, 60, rank=rank
    ),
}
VARIANTS["configured"] = VARIANTS["ours"]


def _configure(variant: str) -> None:
    """Set the telemetry of this process up as a variant has it."""
    structlog.reset_defaults()
    registry = CollectorRegistry()
    if variant != "configured":
        tracedstore.configure(registry=registry)
        return
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    tracedstore.configure(registry=registry, tracer_provider=provider_to_nowhere())


@dataclass(frozen=True, slots=True)
class Completed:
    """A barrier that everybody came to, in milliseconds and round trips of a rank.

    Round trips are of the rank that had the most. ``before_release`` are those of the
    last to come before it let the others go, ``first`` those of the first barrier on
    a connection.
    """

    ranks: int
    torch_ms: float
    ours_ms: float
    configured_ms: float
    torch_round_trips: int
    ours_round_trips: int
    configured_round_trips: int
    torch_before_release: int
    ours_before_release: int
    configured_before_release: int
    ours_first_round_trips: int
    torch_calls: int
    ours_calls: int
    configured_calls: int


@dataclass(frozen=True, slots=True)
class Naming:
    """Naming three missing ranks, in milliseconds, and how often others were named."""

    ranks: int
    torch_ms: float
    ours_ms: float
    torch_wrong: int
    ours_wrong: int

    @property
    def ratio(self) -> float:
        """Ours over torch's."""
        return self.ours_ms / self.torch_ms


# The ranks of one process, told over a pipe what to do.


def _be_ranks(pipe: Connection, port: int, own: int) -> None:
    stores = [
        dist.TCPStore("127.0.0.1", port, None, is_master=False)
        for _ in range(own, max(WORLDS), PROCESSES)
    ]
    configured = ""
    with ThreadPoolExecutor(len(stores)) as pool:
        pipe.send("ready")
        while (told := pipe.recv()) is not None:
            variant, world, prefix, moment = told
            if variant != configured:
                _configure(variant)
                configured = variant
            if moment is None:
                pipe.send("configured")
                continue
            ranks_here = range(own, world, PROCESSES)
            visits = [
                pool.submit(_visit, variant, store, world, prefix, rank, moment)
                for rank, store in zip(ranks_here, stores, strict=False)
            ]
            pipe.send([visit.result() for visit in visits])


def _visit(
    variant: str,
    store: Any,
    world: int,
    prefix: str,
    rank: int,
    moment: float,
) -> tuple[float, float]:
    time.sleep(max(0.0, moment - time.monotonic()))
    started = time.monotonic()
    VARIANTS[variant](store, world, prefix, rank)
    return started, time.monotonic()


@contextmanager
def _processes(port: int) -> Iterator[list[Connection]]:
    """Start the processes that are ranks; give the pipes to them."""
    spawn = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for own in range(PROCESSES):
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=_be_ranks, args=(theirs, port, own), daemon=True)
        process.start()
        pipes.append(pipe)
        started.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in started:
            process.join(10)
    finally:
        for process in started:
            process.kill()


def _told(pipes: list[Connection], *what: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


def _time_one(pipes: list[Connection], variant: str, world: int, prefix: str) -> float:
    """Let a world meet once; give seconds from the first to come to the last to go."""
    _told(pipes, variant, world, prefix, None)
    moment = time.monotonic() + _NOTICE
    visits: list[tuple[float, float]] = [
        visit
        for of_process in _told(pipes, variant, world, prefix, moment)
        for visit in of_process
    ]
    return max(ended for _, ended in visits) - min(started for started, _ in visits)


def _time_completed(
    pipes: list[Connection], world: int, repeats: int
) -> dict[str, float]:
    """Measure the medians of all variants, in milliseconds."""
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(-1, repeats):
        for step in range(len(VARIANTS)):
            # Another one begins each time.
            variant = list(VARIANTS)[(turn + step) % len(VARIANTS)]
            prefix = f"timed/{world}/{turn}/{variant}"
            seconds = _time_one(pipes, variant, world, prefix)
            if turn >= 0:
                taken[variant].append(seconds)
    return {variant: 1e3 * statistics.median(all_) for variant, all_ in taken.items()}


# Round trips, in this process.


@dataclass(frozen=True, slots=True)
class _Counts:
    round_trips: int
    before_release: int
    calls: int
    first: int


def _count(through: Relay, variant: str, world: int) -> _Counts:
    """Count what the rank with the most of it had, in its second barrier."""
    _configure(variant)
    stores = [CountingStore(through) for _ in range(world)]
    most: list[tuple[int, int, int]] = []
    for turn in ("first", "second"):
        prefix = f"counted/{world}/{variant}/{turn}"
        began = [store.line.round_trips for store in stores]
        for store in stores:
            store.calls.clear()
        with ThreadPoolExecutor(world) as pool:
            visits = [
                pool.submit(VARIANTS[variant], store, world, prefix, rank)
                for rank, store in enumerate(stores)
            ]
            for visit in visits:
                visit.result()
        released = BarrierKeys(prefix).last_member
        most.append(
            (
                max(
                    store.line.round_trips - before
                    for store, before in zip(stores, began, strict=True)
                ),
                max(
                    store.before[released] - before
                    for store, before in zip(stores, began, strict=True)
                    if released in store.before
                ),
                max(store.calls.total() for store in stores),
            )
        )
    (first, _, _), (round_trips, before_release, calls) = most
    return _Counts(round_trips, before_release, calls, first)


def _completed(port: int, repeats: int) -> list[Completed]:
    with _processes(port) as pipes:
        timed = {world: _time_completed(pipes, world, repeats) for world in WORLDS}
    rows = []
    with relay(port) as through:
        for world in WORLDS:
            counts = {variant: _count(through, variant, world) for variant in VARIANTS}
            torch, ours, configured = (counts[variant] for variant in VARIANTS)
            rows.append(
                Completed(
                    ranks=world,
                    torch_ms=timed[world]["torch"],
                    ours_ms=timed[world]["ours"],
                    configured_ms=timed[world]["configured"],
                    torch_round_trips=torch.round_trips,
                    ours_round_trips=ours.round_trips,
                    configured_round_trips=configured.round_trips,
                    torch_before_release=torch.before_release,
                    ours_before_release=ours.before_release,
                    configured_before_release=configured.before_release,
                    ours_first_round_trips=ours.first,
                    torch_calls=torch.calls,
                    ours_calls=ours.calls,
                    configured_calls=configured.calls,
                )
            )
    _configure("ours")
    return rows


# Naming the missing.


class TCPStore(dist.TCPStore):
    """A TCPStore, by name too, that knows when its first wait timed out."""

    timed_out: float | None = None

    def wait(self, *args: Any) -> None:
        """Wait, and take the time of the first timeout."""
        try:
            super().wait(*args)
        except dist.DistStoreError:
            if self.timed_out is None:
                self.timed_out = time.perf_counter()
            raise


def _client(port: int) -> Any:
    return TCPStore("127.0.0.1", port, None, is_master=False)


def _name_ours(port: int, world: int, gone: tuple[int, ...], prefix: str) -> Any:
    """Arrive first, have the others arrive, and time out; give seconds and names."""
    store, others = _client(port), _client(port)
    keys = BarrierKeys(prefix)
    came = [rank for rank in range(world) if rank not in gone]
    for rank in came[1:]:
        arrivals.record_arrival(others, keys, rank)

    def count_the_others() -> None:
        others.wait([keys.num_members], timedelta(seconds=10))
        others.add(keys.num_members, len(came) - 1)

    counting = threading.Thread(target=count_the_others)
    counting.start()
    try:
        tracedstore.barrier(
            store, world, prefix, 0.3, rank=came[0], trace_timeout=_TRACE_TIMEOUT
        )
    except tracedstore.BarrierTimeout as error:
        taken = time.perf_counter() - store.timed_out
        named = error.missing_ranks
    counting.join()
    return taken, named


def _name_torchs(port: int, world: int, gone: tuple[int, ...], prefix: str) -> Any:
    """Time out with all the keys there that torch's rank 0 then waits for."""
    store = _client(port)
    keys = BarrierKeys(prefix)
    came = [keys.trace(rank) for rank in range(1, world) if rank not in gone]
    store.multi_set(came, ["<val_ignored>"] * len(came))
    try:
        torchs.barrier(store, world, prefix, 0.3, rank=0, trace_timeout=_TRACE_TIMEOUT)
    except dist.DistStoreError as error:
        taken = time.perf_counter() - store.timed_out
        (listed,) = re.findall(r"missing_ranks=\[(.*?)\]", str(error))
        named = tuple(sorted(map(int, listed.split(", "))))
    return taken, named


def _name(port: int, world: int, repeats: int) -> Naming:
    # The last ones: after the first that is missing torch gives each rank 1 ms, accuses
    # some that are there, and may end early with 16 names.
    gone = (world - 3, world - 2, world - 1)
    # Everybody was here before: those that are gone as well, so each has a name.
    registering = _client(port)
    if registering.check([rank_registry.REGISTRY]):
        registering.delete_key(rank_registry.REGISTRY)
    for rank in range(world):
        rank_registry.register(registering, rank, world)
    found: dict[str, list[tuple[float, tuple[int, ...]]]] = {"ours": [], "torch": []}
    for turn in range(repeats):
        for variant, name in (("ours", _name_ours), ("torch", _name_torchs)):
            prefix = f"missing/{world}/{turn}/{variant}"
            found[variant].append(name(port, world, gone, prefix))
    return Naming(
        ranks=world,
        torch_ms=1e3 * statistics.median(taken for taken, _ in found["torch"]),
        ours_ms=1e3 * statistics.median(taken for taken, _ in found["ours"]),
        torch_wrong=sum(named != gone for _, named in found["torch"]),
        ours_wrong=sum(named != gone for _, named in found["ours"]),
    )


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """Let what is written there be written, and not seen: torch warns of timeouts."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _print(completed: list[Completed], naming: list[Naming]) -> None:
    print(
        f"{'completed, ranks':<20}{'torch':>10}{'ours':>10}{'':>7}{'configured':>12}"
        f"{'':>7}   round trips (before release): torch, ours, configured, ours first"
    )
    for row in completed:
        print(
            f"{row.ranks:<20}{row.torch_ms:>8.2f}ms{row.ours_ms:>8.2f}ms"
            f"{row.ours_ms / row.torch_ms:>6.2f}x{row.configured_ms:>10.2f}ms"
            f"{row.configured_ms / row.torch_ms:>6.2f}x"
            f"   {row.torch_round_trips} ({row.torch_before_release})"
            f", {row.ours_round_trips} ({row.ours_before_release})"
            f", {row.configured_round_trips} ({row.configured_before_release})"
            f", {row.ours_first_round_trips}"
        )
    print(f"{'3 missing, ranks':<20}{'torch':>10}{'ours':>10}{'':>9}   wrong names")
    for found in naming:
        print(
            f"{found.ranks:<20}{found.torch_ms:>8.1f}ms{found.ours_ms:>8.1f}ms"
            f"{found.ratio:>8.4f}x"
            f"   torch {found.torch_wrong}, ours {found.ours_wrong}"
        )


def _bars(completed: list[Completed], naming: list[Naming]) -> list[Bar]:
    more = max(row.ours_round_trips - row.torch_round_trips for row in completed)
    more_configured = max(
        row.configured_round_trips - row.torch_round_trips for row in completed
    )
    largest = naming[-1]
    return [
        Bar.at_most(
            "round trips of a completed barrier more than torch's, of any rank",
            more,
            MOST_ROUND_TRIPS_MORE,
        ),
        Bar.at_most(
            "the same, with structlog and tracing configured",
            more_configured,
            MOST_ROUND_TRIPS_MORE,
        ),
        Bar.at_most(
            f"naming 3 missing of {largest.ranks}, ours / torch's",
            largest.ratio,
            MOST_NAMING_RATIO,
        ),
        Bar.at_most(
            "times that ours named others than the 3",
            sum(row.ours_wrong for row in naming),
            0,
        ),
    ]


def main() -> int:
    """Run the benchmark, print the tables, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=60)
    arguments.add_argument("--naming-repeats", type=int, default=5)
    options = arguments.parse_args()

    # torch asks for the name behind the address of every connection and timeout; how
    # long a name server takes is not what is measured here.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    # For the processes that are started; it warns that there was no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tcp_server() as port:
        completed = _completed(port, options.repeats)
        with _without_standard_error():
            naming = [_name(port, n, options.naming_repeats) for n in LARGE_WORLDS]
    _print(completed, naming)
    results = {
        "completed": [asdict(row) for row in completed],
        "naming": [asdict(row) for row in naming],
    }
    return finish(_bars(completed, naming), results, options.output)


if __name__ == "__main__":
    sys.exit(main())
