"""The steps of a barrier, each of which is several calls of the store.

A store of the native base makes most of them in C++ (``_meet`` and ``_complete`` in
store.cpp): in a barrier the caches are cold, and Python code takes longer than the
calls. These functions do the same with every other store.
"""

from datetime import timedelta
from typing import Any

from tracedstore.coordination.arrivals import (
    publish_traceparent,
    read_key,
    read_ledger,
    read_traceparent,
    record_arrival,
)
from tracedstore.coordination.barrier_telemetry import guarded
from tracedstore.coordination.protocol import BarrierKeys, Ledger
from tracedstore.coordination.trace_context import BarrierSpan


def arrive(store: Any, keys: BarrierKeys, rank: int | None) -> tuple[int, bool]:
    """Record the arrival of a rank, if it is known, and count it.

    Returns:
        The position of the arrival, from 1, and whether it is in the ledger. That it is
        not does not fail a barrier.
    """
    in_ledger = rank is not None and guarded(record_arrival, store, keys, rank)
    order: int = store.add(keys.num_members, 1)
    return order, bool(in_ledger)


def wait_for(
    store: Any, key: str, timeout: timedelta, to_be_read: bool
) -> bytes | None:
    """Wait for a key, and read it; return None if it is not or cannot be read."""
    store.wait([key], timeout)
    return guarded(read_key, store, key) if to_be_read else None


def complete(store: Any, key: str, value: str, ledger: str) -> bytes | None:
    """Set a key, and make a round trip: a TCPStore does not reply to a set.

    That reads the ledger, if its key is not empty.

    Returns:
        The ledger; None if it was not or cannot be read.
    """
    store.set(key, value)
    if not ledger:
        store.check([key])
        return None
    entries: bytes | None = guarded(read_key, store, ledger)
    return entries


def publish_trace(store: Any, keys: BarrierKeys, span: BarrierSpan) -> None:
    """Publish the trace that the other ranks join, as the first rank."""
    span.begin()
    traceparent = span.traceparent()
    if traceparent:
        publish_traceparent(store, keys, traceparent)


def shared_trace(
    store: Any, keys: BarrierKeys, span: BarrierSpan, in_ledger: bool
) -> tuple[str, Ledger]:
    """Return the trace that all ranks join: the first rank's, else this one's."""
    ledger = read_ledger(store, keys, exists=in_ledger)
    shared = read_traceparent(store, keys, ledger)
    if not shared:
        # The first rank runs plain torch, or has not published its trace yet.
        span.begin()
        shared = span.traceparent()
    return shared, ledger
