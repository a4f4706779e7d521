"""The steps of a barrier, each of which is several calls of the store.

A store of the native base makes most of them in C++ (``_meet`` and ``_complete`` in
store.cpp): in a barrier the caches are cold, and Python code takes longer than the
calls. These functions do the same with every other store.
"""

from datetime import timedelta
from typing import Any

from tracedstore.coordination.arrivals import read_key, record_arrival
from tracedstore.coordination.barrier_telemetry import guarded_call
from tracedstore.coordination.protocol import BarrierKeys


def arrive(store: Any, keys: BarrierKeys, rank: int | None) -> tuple[int, bool]:
    """Record the arrival of a rank, if it is known, and count it.

    Returns:
        The position of the arrival, from 1, and whether it is in the ledger. That it is
        not does not fail a barrier.
    """
    in_ledger = rank is not None and guarded_call(record_arrival, store, keys, rank)
    order: int = store.add(keys.num_members, 1)
    return order, bool(in_ledger)


def wait_for(
    store: Any, key: str, timeout: timedelta, to_be_read: bool
) -> bytes | None:
    """Wait for a key, and read it; return None if it is not or cannot be read."""
    store.wait([key], timeout)
    return guarded_call(read_key, store, key) if to_be_read else None


def complete(
    store: Any, keys: BarrierKeys, value: str, in_ledger: bool
) -> bytes | None:
    """Complete a barrier as its last rank, and make a round trip.

    A TCPStore does not acknowledge a set. If this process serves the store and ends
    now, the others get a network error instead of their wake-up. After one round trip
    the server has answered their waits. torch's barrier does the same. Here that reads
    the ledger, if this rank is in it.

    Returns:
        The ledger; None if it was not or cannot be read.
    """
    store.set(keys.last_member, value)
    if not in_ledger:
        store.check([keys.last_member])
        return None
    entries: bytes | None = guarded_call(read_key, store, keys.ledger)
    return entries
