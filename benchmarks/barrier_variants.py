"""The barriers that are compared, and the telemetry that each runs with."""

from collections.abc import Callable
from typing import Any

import structlog
from harness import discarding_provider
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torch_store_utils

import tracedstore

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


def configure(variant: str) -> None:
    """Set up the telemetry of this process for a variant."""
    structlog.reset_defaults()
    registry = CollectorRegistry()
    if variant != "configured":
        tracedstore.configure(registry=registry)
        return
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    tracedstore.configure(registry=registry, tracer_provider=discarding_provider())
