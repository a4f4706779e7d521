"""Who has come to a collective that hangs: one key for each, to which ranks append.

A rank that waits in a collective appends itself once. So a rank that looks reads one
key, and not the records of all ranks of a large job. Nothing is written while nothing
hangs.

The key is ``tracedstore/COLLECTIVES/<attempt>/<group>/<number>``. An entry is the rank,
what it has called as a digest, and the time. A store that cannot append has no ledger;
there the records of the ranks are read (`blocked_record`).
"""

import hashlib
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from tracedstore.coordination.store_access import read_key
from tracedstore.diagnosis.observe.blocked_record import CollectivePosition

COLLECTIVES: Final = "tracedstore/COLLECTIVES"
_ENTRY: Final = re.compile(rb"([0-9]{1,7}):([0-9a-f]{8}):([0-9]{1,11});")
# Bytes of a ledger in any job, and for each rank. An entry has at most 29 of them.
_MAX_BYTES, _BYTES_OF_RANK = 64 * 1024, 64
# Seconds by which the clocks of two hosts may differ.
_CLOCK_TOLERANCE: Final = 60.0


def ledger_key(position: CollectivePosition, attempt: int) -> str:
    """Return the key of a collective's ledger."""
    return f"{COLLECTIVES}/{attempt}/{position.group}/{position.number}"


def enter(store: Any, rank: int, position: CollectivePosition, attempt: int) -> None:
    """Append a rank to the ledger of the collective that it waits in."""
    if position.number is None or not store.has_extended_api():
        return
    entry = f"{rank}:{digest(position)}:{time.time():.0f};"
    store.append(ledger_key(position, attempt), entry)


def digest(position: CollectivePosition) -> str:
    """Return what a rank has called as eight digits."""
    called = f"{position.operation} {position.sizes} {position.dtype}"
    return hashlib.sha256(called.encode("utf-8", "replace")).hexdigest()[:8]


def read_entered(
    store: Any, position: CollectivePosition, attempt: int, world_size: int
) -> Mapping[int, str]:
    """Return the ranks that have entered a collective, and the digests of their calls.

    A group that was created before this one in the same store may have had its name.
    Entries of that are omitted.
    """
    if position.number is None or not store.has_extended_api():
        return {}
    key = ledger_key(position, attempt)
    if not store.check([key]):
        return {}
    since = position.since - _CLOCK_TOLERANCE
    return parse(read_key(store, key), since, world_size)


def parse(value: bytes, since: float, world_size: int) -> Mapping[int, str]:
    """Return the ranks in a ledger, with their digests; none of one that is too long.

    Args:
        value: The ledger.
        since: Earlier entries are omitted; in seconds since the epoch.
        world_size: The number of ranks.
    """
    # A longer one is not the job's.
    if len(value) > _MAX_BYTES + _BYTES_OF_RANK * world_size:
        return {}
    return {
        int(rank): found.decode()
        for rank, found, when in _ENTRY.findall(value)
        if int(rank) < world_size and int(when) >= since
    }
