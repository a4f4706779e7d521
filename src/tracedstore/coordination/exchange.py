"""What torch's ``elastic.utils.store`` has besides the barrier, to the same keys.

Same signatures and same wire layout, so these and torch's own meet. One thing is
different: a store's timeout is what it was afterwards, however it ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tracedstore.coordination.protocol import Keys

# Any, because torch's stubs know less than half of a Store's methods.
AnyStore = Any


@contextmanager
def store_timeout(store: AnyStore, timeout: float) -> Iterator[None]:
    """Give a store another timeout for a while, in seconds."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: AnyStore, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Get ``{prefix}{n}`` for every n below the world size, waiting for each.

    Rank 0 often is the process that serves the store, so it stays until all the
    others have theirs.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{n}" for n in range(world_size)])
    finished = Keys(f"{prefix}/finished")
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
    """Give everybody's data to everybody, in the order of ranks.

    A prefix is for one use: what was written there stays there.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)
