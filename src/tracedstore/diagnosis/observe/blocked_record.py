"""What a blocked rank publishes: its call, the keys, and the ranks it waits for.

The record is under ``tracedstore/BLOCKED/<rank>`` while the call lasts. If the call
fails, it is marked, because the process may end then: what it waited for until then
still counts. The rank itself knows the members of its process groups, so it translates
keys into ranks; readers need no knowledge of keys.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges
from tracedstore.common.codec import (
    Pid,
    Printable,
    Rank,
    Ranks,
    Seconds,
    Small,
    UpTo,
    Words,
)
from tracedstore.coordination.store_access import read_existing, read_key
from tracedstore.local.facts import WrittenFamily

# The key of a rank is this, a slash, and the rank.
BLOCKED: Final = "tracedstore/BLOCKED"
# The ranks that have ever published a record, appended by each once.
_RANKS: Final = "tracedstore/BLOCKED_RANKS"
# Its bytes in any job, and for each rank. A rank is at most seven of them; it is
# appended once an attempt.
_MAX_LEDGER_BYTES, _LEDGER_BYTES_OF_RANK = 64 * 1024, 64
MAX_KEYS: Final = 16
_MAX_RECORD_BYTES = 64 * 1024
# Seconds before a wait begins in which a failed call belongs to the same stall. Ranks
# begin at different times, and the clocks of hosts differ.
_SAME_STALL = 60.0
_RANK = re.compile(rb"[0-9]{1,7}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRecord:
    """One blocked call of a rank.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id.
        attempt: The attempt of torchrun that it belongs to, 0 without torchrun.
        operation: The Store method, or ``connect``.
        keys: The first keys that it waits for and that do not exist.
        phase: What the rank executes, for people.
        protocol: The protocol that the keys belong to; "" for keys that are not
            torch's. Two ranks that wait for each other in one protocol, but in other
            groups, have diverged.
        group: The key prefix that the ranks of one group share; "" without one.
        awaits: The ranks that should write the keys; None if they are unknown.
        members: The ranks of which one should write the keys; None for all.
        wrote: What this rank wrote to the families of these keys, if they are not
            torch's.
        started: When the call began, in seconds since the epoch.
        failed: When it failed, in seconds since the epoch; None while it lasts.
    """

    rank: Rank
    host: Printable
    pid: Pid
    attempt: Small = 0
    operation: Printable
    keys: Annotated[tuple[Printable, ...], UpTo(MAX_KEYS)]
    phase: Printable
    protocol: Words = ""
    group: Words = ""
    awaits: Ranks | None = None
    members: Ranks | None = None
    wrote: Annotated[tuple[WrittenFamily, ...], UpTo(MAX_KEYS)] = ()
    started: Seconds
    failed: Seconds | None = None

    def is_of_stall(self, started: float) -> bool:
        """Return whether it belongs to a stall in which a call began at this time.

        The record of a failed call may be of an earlier run in the same store.
        """
        return self.failed is None or self.failed > started - _SAME_STALL

    def to_bytes(self) -> bytes:
        """Encode the record for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "BlockedRecord | None":
        """Decode a record; None if the value is empty, malformed or too large.

        So it is if it has a rank that the job has not.
        """
        return codec.decode(cls, value, _MAX_RECORD_BYTES, world_size)


def publish_blocked(store: Any, record: BlockedRecord, *, first: bool) -> None:
    """Publish the record of a rank.

    Args:
        store: The store.
        record: The record.
        first: This process publishes its first record.
    """
    store.set(blocked_key(record.rank), record.to_bytes())
    if first and store.has_extended_api():
        store.append(_RANKS, f"{record.rank} ")


def withdraw_blocked(store: Any, rank: int) -> None:
    """Withdraw the record of a rank."""
    # Emptied, not deleted: an EtcdStore cannot delete, and a reader gets the values of
    # keys that exist in one request, but has to search for keys that do not.
    store.set(blocked_key(rank), "")


def read_blocked(store: Any, world_size: int) -> dict[int, BlockedRecord]:
    """Read the records of all ranks that have a valid one, failed calls included."""
    ranks: Iterable[int] = range(world_size)
    if store.has_extended_api():
        if not store.check([_RANKS]):
            return {}
        written = read_key(store, _RANKS)
        # A longer one is not the job's: the ranks are looked for without it.
        if len(written) <= _MAX_LEDGER_BYTES + _LEDGER_BYTES_OF_RANK * world_size:
            numbers = {int(one) for one in written.split() if _RANK.fullmatch(one)}
            ranks = sorted(rank for rank in numbers if rank < world_size)
    values = read_existing(store, [blocked_key(rank) for rank in ranks])
    records = (BlockedRecord.from_bytes(value, world_size) for value in values)
    return {record.rank: record for record in records if record is not None}


def blocked_key(rank: int) -> str:
    """Return the key of a rank's record."""
    return f"{BLOCKED}/{rank}"
