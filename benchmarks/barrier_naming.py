"""Measures how long a barrier takes to name the missing ranks.

The duration is from the timeout to the exception that has the names. The arrivals of
the other ranks are in the store: written by the code that ranks run, and for torch's
barrier the keys that its scan waits for.
"""

import re
import statistics
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils import store as torch_store_utils

import tracedstore
from tracedstore.coordination import arrivals, rank_registry
from tracedstore.coordination.arrivals import BarrierKeys

WORLDS = (1024, 16_384)
_BARRIER_TIMEOUT = 0.3
_TRACE_TIMEOUT = 0.1

Named = tuple[float, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Naming:
    """Naming three missing ranks: milliseconds, and how often others were named."""

    ranks: int
    torch_ms: float
    ours_ms: float
    torch_wrong: int
    ours_wrong: int

    @property
    def ratio(self) -> float:
        """The duration of tracedstore's barrier over that of torch's."""
        return self.ours_ms / self.torch_ms


class TCPStore(dist.TCPStore):
    """A TCPStore that records when its first wait timed out.

    It has the name of its base class, because tracedstore recognises a TCPStore by the
    name of its class.
    """

    timed_out: float | None = None

    def wait(self, *args: Any) -> None:
        """Wait, and record the time of the first timeout."""
        try:
            super().wait(*args)
        except dist.DistStoreError:
            if self.timed_out is None:
                self.timed_out = time.perf_counter()
            raise


def measure(port: int, world: int, repeats: int) -> Naming:
    """Measure one world size on the TCPStore at a port."""
    # The last three ranks: after the first missing rank torch waits 1 ms per rank,
    # names some that have arrived, and may stop early with 16 names.
    missing = (world - 3, world - 2, world - 1)
    # All ranks are registered, including the missing ones, so each has a name.
    client = _client(port)
    if client.check([rank_registry.REGISTRY]):
        client.delete_key(rank_registry.REGISTRY)
    for rank in range(world):
        rank_registry.register(client, rank, world)
    results: dict[str, list[Named]] = {"ours": [], "torch": []}
    for turn in range(repeats):
        for variant, run in (("ours", _run_ours), ("torch", _run_torch)):
            prefix = f"missing/{world}/{turn}/{variant}"
            results[variant].append(run(port, world, missing, prefix))
    return Naming(
        ranks=world,
        torch_ms=1e3 * statistics.median(seconds for seconds, _ in results["torch"]),
        ours_ms=1e3 * statistics.median(seconds for seconds, _ in results["ours"]),
        torch_wrong=sum(named != missing for _, named in results["torch"]),
        ours_wrong=sum(named != missing for _, named in results["ours"]),
    )


def _client(port: int) -> Any:
    return TCPStore("127.0.0.1", port, None, is_master=False)


def _run_ours(port: int, world: int, missing: tuple[int, ...], prefix: str) -> Named:
    """Arrive first, let the others arrive, and time out; return seconds and ranks."""
    store, others = _client(port), _client(port)
    keys = BarrierKeys(prefix)
    arrived = [rank for rank in range(world) if rank not in missing]
    for rank in arrived[1:]:
        arrivals.record_arrival(others, keys, rank)

    def count_the_others() -> None:
        others.wait([keys.num_members], timedelta(seconds=10))
        others.add(keys.num_members, len(arrived) - 1)

    counting = threading.Thread(target=count_the_others)
    counting.start()
    try:
        tracedstore.barrier(
            store,
            world,
            prefix,
            _BARRIER_TIMEOUT,
            rank=arrived[0],
            trace_timeout=_TRACE_TIMEOUT,
        )
    except tracedstore.BarrierTimeout as error:
        seconds = time.perf_counter() - store.timed_out
        named = error.missing_ranks
    counting.join()
    return seconds, named


def _run_torch(port: int, world: int, missing: tuple[int, ...], prefix: str) -> Named:
    """Write the keys that torch's rank 0 waits for, and time out as rank 0."""
    store = _client(port)
    keys = BarrierKeys(prefix)
    arrived = [keys.trace(rank) for rank in range(1, world) if rank not in missing]
    store.multi_set(arrived, ["<val_ignored>"] * len(arrived))
    try:
        torch_store_utils.barrier(
            store,
            world,
            prefix,
            _BARRIER_TIMEOUT,
            rank=0,
            trace_timeout=_TRACE_TIMEOUT,
        )
    except dist.DistStoreError as error:
        seconds = time.perf_counter() - store.timed_out
        (listed,) = re.findall(r"missing_ranks=\[(.*?)\]", str(error))
        named = tuple(sorted(map(int, listed.split(", "))))
    return seconds, named
