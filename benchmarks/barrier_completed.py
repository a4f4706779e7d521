"""Measures completed barriers: duration, and round trips per rank.

Ranks are threads in a few processes. Each has its own connection, and all arrive at the
same moment. The duration is from the first arrival to the last return. Round trips are
counted on the wire, in a separate run. Each rank registers itself in its first barrier
on a connection; that barrier is counted, and not timed.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from barrier_variants import VARIANTS, configure
from wire import CountingStore, Relay, relay

from tracedstore.coordination.protocol import BarrierKeys

WORLDS = (2, 16, 64, 256)
PROCESSES = 4
# Seconds until all ranks have received their instructions and wait for the start time.
_START_DELAY = 0.02


@dataclass(frozen=True, slots=True)
class Completed:
    """Completed barriers of one world size: milliseconds, and round trips of a rank.

    Round trips are those of the rank with the most. ``before_release`` counts the round
    trips of the last rank before it released the others, ``first`` those of the first
    barrier on a connection.
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


def measure(port: int, repeats: int) -> list[Completed]:
    """Measure all world sizes on the TCPStore at a port."""
    with _processes(port) as pipes:
        durations = {
            world: _median_durations(pipes, world, repeats) for world in WORLDS
        }
    rows = []
    with relay(port) as through:
        for world in WORLDS:
            counts = {variant: _count(through, variant, world) for variant in VARIANTS}
            torch, ours, configured = (counts[variant] for variant in VARIANTS)
            rows.append(
                Completed(
                    ranks=world,
                    torch_ms=durations[world]["torch"],
                    ours_ms=durations[world]["ours"],
                    configured_ms=durations[world]["configured"],
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
    configure("ours")
    return rows


# Durations, in other processes, which receive instructions over pipes.


def _run_ranks(pipe: Connection, port: int, process: int) -> None:
    """Run the ranks of one process: instructions arrive over a pipe, until None."""
    stores = [
        dist.TCPStore("127.0.0.1", port, None, is_master=False)
        for _ in range(process, max(WORLDS), PROCESSES)
    ]
    configured = ""
    with ThreadPoolExecutor(len(stores)) as pool:
        pipe.send("ready")
        while (instruction := pipe.recv()) is not None:
            variant, world, prefix, start = instruction
            if variant != configured:
                configure(variant)
                configured = variant
            if start is None:
                pipe.send("configured")
                continue
            ranks = range(process, world, PROCESSES)
            calls = [
                pool.submit(_call_barrier, variant, store, world, prefix, rank, start)
                for rank, store in zip(ranks, stores, strict=False)
            ]
            pipe.send([call.result() for call in calls])


def _call_barrier(
    variant: str,
    store: Any,
    world: int,
    prefix: str,
    rank: int,
    start: float,
) -> tuple[float, float]:
    """Call the barrier at the start time; return when it began and ended."""
    time.sleep(max(0.0, start - time.monotonic()))
    began = time.monotonic()
    VARIANTS[variant](store, world, prefix, rank)
    return began, time.monotonic()


@contextmanager
def _processes(port: int) -> Iterator[list[Connection]]:
    """Start the processes of the ranks, and yield the pipes to them."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(PROCESSES):
        pipe, other_end = spawn.Pipe()
        process = spawn.Process(
            target=_run_ranks, args=(other_end, port, number), daemon=True
        )
        process.start()
        pipes.append(pipe)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def _instruct(pipes: list[Connection], *instruction: Any) -> list[Any]:
    """Send one instruction to all processes, and return their replies."""
    for pipe in pipes:
        pipe.send(instruction)
    return [pipe.recv() for pipe in pipes]


def _duration(pipes: list[Connection], variant: str, world: int, prefix: str) -> float:
    """Run one barrier; return seconds from the first arrival to the last return."""
    _instruct(pipes, variant, world, prefix, None)
    start = time.monotonic() + _START_DELAY
    calls: list[tuple[float, float]] = [
        call
        for of_process in _instruct(pipes, variant, world, prefix, start)
        for call in of_process
    ]
    return max(ended for _, ended in calls) - min(began for began, _ in calls)


def _median_durations(
    pipes: list[Connection], world: int, repeats: int
) -> dict[str, float]:
    """Measure the median duration of each variant, in milliseconds."""
    durations: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(-1, repeats):
        for step in range(len(VARIANTS)):
            # Each turn begins with another variant.
            variant = list(VARIANTS)[(turn + step) % len(VARIANTS)]
            prefix = f"timed/{world}/{turn}/{variant}"
            seconds = _duration(pipes, variant, world, prefix)
            if turn >= 0:
                durations[variant].append(seconds)
    return {
        variant: 1e3 * statistics.median(seconds)
        for variant, seconds in durations.items()
    }


# Round trips, in this process.


@dataclass(frozen=True, slots=True)
class _Counts:
    round_trips: int
    before_release: int
    calls: int
    first: int


def _count(through: Relay, variant: str, world: int) -> _Counts:
    """Count the round trips and calls of the rank with the most, in two barriers."""
    configure(variant)
    stores = [CountingStore(through) for _ in range(world)]
    maxima: list[tuple[int, int, int]] = []
    for turn in ("first", "second"):
        prefix = f"counted/{world}/{variant}/{turn}"
        before = [store.connection.round_trips for store in stores]
        for store in stores:
            store.calls.clear()
        with ThreadPoolExecutor(world) as pool:
            calls = [
                pool.submit(VARIANTS[variant], store, world, prefix, rank)
                for rank, store in enumerate(stores)
            ]
            for call in calls:
                call.result()
        release = BarrierKeys(prefix).last_member
        maxima.append(
            (
                max(
                    store.connection.round_trips - earlier
                    for store, earlier in zip(stores, before, strict=True)
                ),
                max(
                    store.round_trips_before_set[release] - earlier
                    for store, earlier in zip(stores, before, strict=True)
                    if release in store.round_trips_before_set
                ),
                max(store.calls.total() for store in stores),
            )
        )
    (first, _, _), (round_trips, before_release, calls_made) = maxima
    return _Counts(round_trips, before_release, calls_made, first)
