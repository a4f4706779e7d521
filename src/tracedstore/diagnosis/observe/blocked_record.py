"""What a blocked rank publishes: its call, the keys, and the ranks it waits for.

The record is under ``tracedstore/BLOCKED/<rank>`` while the call lasts. If the call
fails, it is marked, because the process may end then: what it waited for until then
still counts. The rank itself knows the members of its process groups, so it translates
keys into ranks; readers need no knowledge of keys.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges
from tracedstore.common.codec import (
    Large,
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
# The operation of a rank that waits, but is in no Store call.
CONNECTS: Final = "connect"
MAX_KEYS: Final = 16
# The latest collectives of a record that have ended.
MAX_RECENT: Final = 4
# The groups of a rank of which a record has the last collective.
MAX_GROUPS: Final = 64
# The protocol of a record of a collective.
COLLECTIVE: Final = "collective"
_MAX_RECORD_BYTES = 64 * 1024
# Seconds before a wait begins in which a failed call belongs to the same stall. Ranks
# begin at different times, and the clocks of hosts differ.
_SAME_STALL = 60.0
_RANK = re.compile(rb"[0-9]{1,7}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A collective that a rank has called, or would call.

    Attributes:
        number: Its number in its group, from 1; 0 for one that it would call.
        operation: What it is, in the spelling of ``torch.distributed``.
        sizes: The size of the tensor that all ranks have in common; "" if there is
            none.
        dtype: The type of its elements; "" without elements.
    """

    number: Large
    operation: Printable
    sizes: Words = ""
    dtype: Words = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePosition:
    """In which collective of which process group a rank waits.

    Attributes:
        group: The name of the group, which all of its ranks share.
        description: Its description; "" without one.
        number: The number of the collective in the group, from 1; None for what has no
            number: point-to-point operations, and what was seen in a stack only.
        operation: What it is, in the spelling of ``torch.distributed``.
        sizes: The size of the tensor that all ranks have in common; "" if there is
            none.
        dtype: The type of its elements; "" without elements.
        recent: The last collectives of the group that have ended, the latest last.
        expected: What the rank would call next, going by its earlier calls.
        since: When the rank saw the group first, in seconds since the epoch.
        place: The line of the program that called it; "" if it is unknown.
        called: The last collective that the rank has called, by group. It may have
            called several, of which the first has not ended.
    """

    group: Printable
    description: Words = ""
    number: Large | None = None
    operation: Printable
    sizes: Words = ""
    dtype: Words = ""
    recent: Annotated[tuple[Called, ...], UpTo(MAX_RECENT)] = ()
    expected: Called | None = None
    since: Seconds = 0.0
    place: Words = ""
    called: Annotated[Mapping[Printable, Large], UpTo(MAX_GROUPS)] = field(
        default_factory=dict, hash=False
    )

    @property
    def phase(self) -> str:
        """What the rank executes: ``all_reduce 2501 of group 0 (default_pg)``."""
        number = "" if self.number is None else f" {self.number}"
        description = f" ({self.description})" if self.description else ""
        return f"{self.operation}{number} of group {self.group}{description}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRecord:
    """One blocked call of a rank: of a Store, or of a process group.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id.
        attempt: The attempt of torchrun that it belongs to, 0 without torchrun.
        operation: The Store method, ``connect``, or the collective.
        keys: The first keys that it waits for and that do not exist.
        phase: What the rank executes, for people.
        protocol: The protocol that the keys belong to; "" for keys that are not
            torch's. Two ranks that wait for each other in one protocol, but in other
            groups, have diverged.
        group: The key prefix that the ranks of one group share; "" without one.
        awaits: The ranks that should write the keys; None if they are unknown.
        members: The ranks of which one should write the keys; None for all.
        creates: The process group that the rank creates, as torch calls it; "" if it
            creates none.
        wrote: What this rank wrote to the families of these keys, if they are not
            torch's.
        may_be_idle: The rank may wait so while it has nothing to do: a helper thread is
            in the call, and the main thread waits for that, or the rank polls.
        started: When the call began, in seconds since the epoch. If a program repeats
            a call that times out, that is the first one.
        failed: When it failed, in seconds since the epoch; None while it lasts.
        collective: The position of the rank, if it waits in a collective.
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
    creates: Words = ""
    wrote: Annotated[tuple[WrittenFamily, ...], UpTo(MAX_KEYS)] = ()
    may_be_idle: bool = False
    started: Seconds
    failed: Seconds | None = None
    collective: CollectivePosition | None = None

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


def read_blocked(
    store: Any, world_size: int, some: Iterable[int] | None = None
) -> dict[int, BlockedRecord]:
    """Read the records of all ranks that have a valid one, failed calls included.

    Args:
        store: The store.
        world_size: The number of ranks.
        some: Only these ranks.
    """
    ranks: Iterable[int] = range(world_size) if some is None else sorted(some)
    if some is None and store.has_extended_api():
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
