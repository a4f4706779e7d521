"""Measures how long a completed barrier takes, with each rank in a process of its own.

All ranks arrive at a time that they agreed on, each over its own connection to the
server of a TCPStore. The duration is from the first arrival to the last return. In each
process torch's barrier and ours take turns, so that both find the same caches. One set
of processes is as a job that only calls the barrier; one is "configured". Processes are
forked from one that has imported torch.

The lower quartile of the durations is taken: another process that uses the machine
makes a barrier longer, and never shorter. How processes are laid out in memory and on
the cores matters more: the ratios of single sets of processes differ by up to 0.3. So
each measurement is made with several sets, and the one with the median ratio counts.

What is compared, and the telemetry that each barrier runs with, are here too.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import structlog
import torch.distributed as dist
from harness import discarding_provider
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torch_store_utils

import tracedstore
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    encode_arrival,
    last_arrival,
)

# Seconds until all ranks have received their instruction and sleep until the start.
_START_DELAY, _START_DELAY_PER_RANK = 0.005, 0.0005


Barrier = Callable[[Any, int, str, int], None]


def _torch_barrier(store: Any, world_size: int, prefix: str, rank: int) -> None:
    torch_store_utils.barrier(store, world_size, prefix, 60, rank=rank)


def _our_barrier(store: Any, world_size: int, prefix: str, rank: int) -> None:
    tracedstore.barrier(store, world_size, prefix, 60, rank=rank)


VARIANTS: dict[str, Barrier] = {
    "torch": _torch_barrier,
    "ours": _our_barrier,
    "configured": _our_barrier,
}


def _calls(store: Any, world_size: int, prefix: str, rank: int) -> None:
    keys = BarrierKeys(prefix)
    store.append(keys.ledger, encode_arrival(rank, time.time()))
    if store.add(keys.num_members, 1) == world_size:
        store.set(keys.last_member, "")
        store.compare_set(keys.ledger, "", "")
    else:
        store.wait([keys.last_member], timedelta(seconds=60))


def _calls_and_last_rank(store: Any, world_size: int, prefix: str, rank: int) -> None:
    keys = BarrierKeys(prefix)
    store.append(keys.ledger, encode_arrival(rank, time.time()))
    if store.add(keys.num_members, 1) == world_size:
        store.set(keys.last_member, last_arrival(rank))
        store.compare_set(keys.ledger, "", "")
    else:
        store.wait([keys.last_member], timedelta(seconds=60))
        store.compare_set(keys.last_member, "", "")


# What a barrier cannot do without, on the bare store: its calls, and with telemetry the
# last rank, which the others read.
FLOORS: dict[str, Barrier] = {
    "calls": _calls,
    "calls and last rank": _calls_and_last_rank,
}


def configure(variant: str) -> None:
    """Set up the telemetry of this process for a variant.

    No call counts as slow. With dozens of ranks to a core every call is, which has a
    cost of its own.
    """
    structlog.reset_defaults()
    common: dict[str, Any] = {"registry": CollectorRegistry(), "slow_after": 60}
    if variant != "configured":
        tracedstore.configure(**common)
        return
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    tracedstore.configure(**common, tracer_provider=discarding_provider())


@dataclass(frozen=True, slots=True)
class Durations:
    """How long a barrier takes, in milliseconds: torch's, and ours in its turns."""

    torch: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times as long as torch's ours takes."""
        return self.ours / self.torch


def measure(
    port: int, variant: str, worlds: tuple[int, ...], repeats: int, sets: int
) -> dict[int, Durations]:
    """Measure a variant of ours against torch's, by world size.

    Args:
        port: The port of a TCPStore.
        variant: The variant.
        worlds: The world sizes.
        repeats: Barriers of each kind in a set of processes.
        sets: Number of sets of processes.
    """
    found: dict[int, list[Durations]] = {world: [] for world in worlds}
    for number in range(sets):
        with _ranks(port, max(worlds), variant) as pipes:
            for world in worlds:
                prefix = f"timed/{variant}/{number}/{world}"
                found[world].append(_turns(pipes[:world], prefix, variant, repeats))
    return {
        world: sorted(durations, key=lambda each: each.ratio)[sets // 2]
        for world, durations in found.items()
    }


def _turns(
    pipes: list[Connection], prefix: str, variant: str, repeats: int
) -> Durations:
    seconds: dict[str, list[float]] = {"torch": [], variant: []}
    # The first turns register the ranks, and warm the caches.
    for turn in range(-2, repeats):
        # Each turn begins with the other one.
        for each in sorted(seconds, reverse=bool(turn % 2)):
            duration = _duration(pipes, each, f"{prefix}/{turn}/{each}")
            if turn >= 0:
                seconds[each].append(duration)
    return Durations(
        *(
            1e3 * statistics.quantiles(seconds[each], n=4, method="inclusive")[0]
            for each in ("torch", variant)
        )
    )


def _duration(pipes: list[Connection], variant: str, prefix: str) -> float:
    """Run one barrier; return seconds from the first arrival to the last return."""
    start = time.monotonic() + _START_DELAY + _START_DELAY_PER_RANK * len(pipes)
    for pipe in pipes:
        pipe.send((variant, len(pipes), prefix, start))
    calls: list[tuple[float, float]] = [pipe.recv() for pipe in pipes]
    return max(ended for _, ended in calls) - min(began for began, _ in calls)


@contextmanager
def _ranks(port: int, world: int, variant: str) -> Iterator[list[Connection]]:
    """Start the processes of the ranks, and yield the pipes to them."""
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    gc.freeze()  # the children share what is there
    try:
        for rank in range(world):
            pipe, other_end = fork.Pipe()
            process = fork.Process(
                target=_run_rank, args=(other_end, port, rank, variant), daemon=True
            )
            process.start()
            pipes.append(pipe)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        gc.unfreeze()
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _run_rank(pipe: Connection, port: int, rank: int, variant: str) -> None:
    """Call the barriers that a pipe asks for."""
    configure(variant)
    bare = dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=60)
    )
    traced = tracedstore.wrap(bare)
    variants = VARIANTS | FLOORS
    pipe.send("ready")
    while True:
        each, world, prefix, start = pipe.recv()
        store = traced if each in ("ours", "configured") else bare
        barrier = variants[each]
        time.sleep(max(0.0, start - time.monotonic()))
        began = time.monotonic()
        barrier(store, world, prefix, rank)
        pipe.send((began, time.monotonic()))
