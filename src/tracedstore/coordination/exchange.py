"""get_all, synchronize and store_timeout of ``torch.distributed.elastic.utils.store``.

Signatures, keys and values are torch's, so that ranks which call these and ranks which
call torch's functions work together. There is one difference: the store's timeout is
restored on failure too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tracedstore.coordination.protocol import BarrierKeys

# Any, because torch's stubs declare less than half of a Store's methods.
AnyStore = Any


@contextmanager
def store_timeout(store: AnyStore, timeout: float) -> Iterator[None]:
    """Set a store's timeout, in seconds, and restore the old one on exit."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: AnyStore, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Get ``{prefix}{n}`` for every n below the world size; wait for each key.

    Rank 0 is often the process that serves the store, so it returns only after all
    other ranks have read their values.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{n}" for n in range(world_size)])
    finished = BarrierKeys(f"{prefix}/finished")
    if store.add(finished.num_members, 1) == world_size:
        store.set(finished.last_member, "<val_ignored>")
    if rank == 0:
        store.wait([finished.last_member])
    return values


def synchronize(
    store: AnyStore,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Exchange data between all ranks; return it in the order of ranks.

    A prefix can be used only once, because its keys are not deleted.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)
