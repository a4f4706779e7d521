"""What a blocked Store call waits for, as far as this process knows."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracedstore.common.identity import ProcessIdentity, restart_count
from tracedstore.common.keys import fold, shown
from tracedstore.coordination.arrivals import absent_keys, read_arrivals
from tracedstore.coordination.barrier import waiting_barrier
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.diagnosis.observe import groups
from tracedstore.diagnosis.observe.blocked_record import MAX_KEYS, BlockedRecord
from tracedstore.diagnosis.observe.rank_keys import awaited_in
from tracedstore.diagnosis.observe.torch_keys import KeyMeaning, meaning
from tracedstore.local.facts import WrittenFamily
from tracedstore.local.key_writers import KEY_WRITERS
from tracedstore.recording.counters import ActiveCall

# Maximum number of keys of a call that are checked.
_MAX_KEYS_CHECKED = 8192
# Ranks of a group up to which each of them checks the keys of all. In a larger one,
# only the ranks that look do: the keys of 16,384 ranks have half a megabyte.
MAX_SIBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of this process in a store.

    Attributes:
        rank: The rank.
        world_size: The number of ranks that share the store.
        host_of: Returns the host on which a rank should run, "" if it is unknown.
        agents: The host and the process id of each of torchrun's agents, if the ranks
            are theirs; else None.
    """

    rank: int
    world_size: int
    host_of: Callable[[int], str]
    agents: Mapping[int, tuple[str, int]] | None = None


def describe_call(
    connection: Any,
    call: ActiveCall,
    member: Member,
    started: float,
    *,
    complete: bool = False,
    also: Sequence[int] = (),
) -> BlockedRecord | None:
    """Return the record of a blocked call; None if nothing keeps it any more.

    Args:
        connection: A connection to the store of the call.
        call: The call.
        member: The rank of this process.
        started: When the call began, in seconds since the epoch.
        complete: Find all ranks that the call waits for also in a large group, where
            each rank does not. They wait for the first absent one.
        also: In a large group, check the keys of these ranks as well.
    """
    keys, count = call.method.keys_of(call.args)
    texts = [key for key in keys if isinstance(key, str)][:_MAX_KEYS_CHECKED]
    absent = texts
    if call.method.name not in ("barrier", "queue_pop"):
        absent = absent_keys(connection, texts)
        if count and not absent:
            return None
    record = BlockedRecord(
        rank=member.rank,
        host=ProcessIdentity().host,
        pid=os.getpid(),
        attempt=restart_count(os.environ),
        operation=call.method.name,
        keys=shown(absent[:MAX_KEYS]),
        phase=_phase(call.method.name, absent),
        started=started,
    )
    known = meaning(absent[0]) if absent else None
    if call.method.name == "barrier":
        return replace(record, protocol="store_barrier", members=_counted(call, member))
    if known is None or known.agents is not (member.agents is not None):
        awaits = awaited_in(texts, absent, member.world_size)
        return replace(record, awaits=awaits, wrote=_wrote(record.keys))
    members = _members(known, member)
    complete = complete or len(members or ()) <= MAX_SIBLINGS
    return replace(
        record,
        phase=known.phase,
        protocol=known.protocol,
        group=known.group,
        # Not listed by each of ten thousand ranks.
        members=None if members == tuple(range(member.world_size)) else members,
        awaits=_writers(connection, absent, known, members, None if complete else also),
    )


def _counted(call: ActiveCall, member: Member) -> tuple[int, ...]:
    """Return the ranks of ``Store.barrier``; none if it is not for all ranks."""
    everyone = call.args[1:2] == (member.world_size,)
    return tuple(range(member.world_size)) if everyone else ()


def _phase(operation: str, absent: Sequence[str]) -> str:
    noun = "barrier" if operation == "barrier" else "key"
    return f"{noun} {shown(absent[:1])[0]}" if absent else operation


def _members(known: KeyMeaning, member: Member) -> tuple[int, ...] | None:
    """Return the ranks that take part; None if they are unknown."""
    if known.group_name:
        return groups.members(known.group_name)
    return tuple(range(member.world_size))


def _writers(
    connection: Any,
    absent: Sequence[str],
    known: KeyMeaning,
    members: tuple[int, ...] | None,
    also: Sequence[int] | None,
) -> tuple[int, ...] | None:
    """Return the ranks that should write the absent keys; None if unknown.

    Args:
        connection: A connection to the store of the call.
        absent: The absent keys of the call.
        known: What the first of them is for.
        members: The ranks that take part.
        also: Ranks whose keys are checked as well; None for all.
    """
    if members is None:
        return None
    if known.sibling is not None and also != ():
        # gloo waits for one rank after the other: the ranks after the first absent one
        # may be absent too.
        checked = members if also is None else set(also).intersection(members)
        numbers = [number for number, one in enumerate(members) if one in checked]
        siblings = [known.sibling.format(rank=number) for number in numbers]
        known_absent = () if also is None else absent
        absent = list({*known_absent, *absent_keys(connection, siblings)})
    elif (world_size := waiting_barrier(absent[0])) is not None:
        prefix = absent[0].removesuffix("/last_member")
        arrivals = read_arrivals(connection, BarrierKeys(prefix), world_size)
        return None if arrivals.unidentified_count else arrivals.unseen_ranks
    writers: set[int] = set()
    for key in absent:
        one = meaning(key)
        found = None if one is None else one.writers_in(len(members))
        if found is None:
            return None
        writers.update(found)
    return tuple(sorted(members[rank] for rank in writers if rank < len(members)))


def _wrote(keys: Sequence[str]) -> tuple[WrittenFamily, ...]:
    """Return what this process wrote to the families of keys that it waits for."""
    families = {fold(key) for key in keys}
    written = map(KEY_WRITERS.wrote, sorted(families))
    return tuple(one for one in written if one is not None)


def is_barrier(call: ActiveCall) -> bool:
    """Return whether a call is the wait of this package's barrier.

    The barrier finds out by itself who is missing.
    """
    keys, _ = call.method.keys_of(call.args)
    return any(
        isinstance(key, str) and waiting_barrier(key) is not None for key in keys
    )
