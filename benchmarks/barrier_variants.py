"""The barriers that are compared, and the telemetry that each runs with."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from harness import discarding_provider
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torch_store_utils

import tracedstore
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    encode_arrival,
    last_arrival,
)

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
