"""The blocked Store calls of this process, and what each of them waits for.

The writers of a key are known for torch's keys (`torch_keys`). Those of users' keys
follow from the keys themselves, if every rank writes one with its rank in it, or from
what ranks wrote to keys of the same family.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from tracedstore.common.identity import ProcessIdentity, restart_count
from tracedstore.common.keys import fold, fold_numbers, replace_number, shown
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.coordination.arrivals import BarrierKeys, read_arrivals
from tracedstore.coordination.barrier import waiting_barrier
from tracedstore.coordination.rank_registry import Member
from tracedstore.coordination.store_access import absent_keys
from tracedstore.diagnosis.observe import torch_keys
from tracedstore.diagnosis.observe.blocked_record import MAX_KEYS, BlockedRecord
from tracedstore.diagnosis.observe.torch_keys import KeyMeaning, meaning, shown_phase
from tracedstore.local.facts import KEY_WRITERS, WrittenFamily
from tracedstore.recording.counters import ActiveCall
from tracedstore.recording.recorder import Recorder

# The share of `stall_after` after which a call is examined, so that the verdict is
# known when it is due.
_SHARE_OF_STALL = 0.8
# The share of its own timeout after which it is examined, if that is sooner.
_SHARE_OF_TIMEOUT = 0.4
# Seconds from which on a call that times out is explained.
MIN_EXPLAINED_WAIT: Final = 1.0
# Maximum number of keys of a call that are checked.
_MAX_KEYS_CHECKED = 8192
# Ranks of a group up to which each of them checks the keys of all. In a larger one,
# only the ranks that look do: the keys of 16,384 ranks have half a megabyte.
MAX_SIBLINGS = 16
# Maximum number of variable parts of a key that are tried as the rank.
_MAX_POSITIONS: Final = 4
# Ranks whose own key exists, from which on that is no coincidence.
_MIN_PRESENT: Final = 2
# The protocols of the creation of a process group.
_CREATION: Final = ("gloo", "nccl_unique_id")
# Writers whose rank was a number in their key, from which on that is a rule.
_MIN_WRITERS = 2


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

    The exit barrier of torchrun's agents keeps a call, and is no stall.

    Args:
        connection: A connection to the store of the call.
        call: The call.
        member: The rank of this process.
        started: When the call began, in seconds since the epoch.
        complete: Find all ranks that the call waits for also in a large group, where
            each rank does not. They wait for the first absent one.
        also: In a large group, check the keys of these ranks as well.
    """
    keys, _ = call.method.keys_of(call.args)
    texts = [key for key in keys if isinstance(key, str)][:_MAX_KEYS_CHECKED]
    operation = call.method.name
    record = describe_keys(
        connection, operation, texts, member, started, complete=complete, also=also
    )
    if record is None or operation != "barrier":
        return record
    return replace(record, protocol="store_barrier", members=_counted(call, member))


def describe_keys(
    connection: Any,
    operation: str,
    texts: Sequence[str],
    member: Member,
    started: float,
    *,
    complete: bool = False,
    also: Sequence[int] = (),
) -> BlockedRecord | None:
    """Return the record of a rank that waits for keys; None if they exist.

    Args:
        connection: A connection to the store.
        operation: The Store method with which it waits.
        texts: The keys.
        member: The rank of this process.
        started: When it began to wait, in seconds since the epoch.
        complete: See `describe_call`.
        also: The same.
    """
    absent = list(texts)
    if operation not in ("barrier", "queue_pop"):
        absent = absent_keys(connection, texts)
        if texts and not absent:
            return None
    record = BlockedRecord(
        rank=member.rank,
        host=ProcessIdentity().host,
        pid=os.getpid(),
        attempt=restart_count(os.environ),
        operation=operation,
        keys=shown(absent[:MAX_KEYS]),
        phase=_phase(operation, absent),
        started=started,
    )
    known = meaning(absent[0]) if absent else None
    if known is not None and known.ends_job:
        return None  # nodes end at different times, and the barrier names its absent
    if operation == "barrier":
        return record
    if known is None or known.agents is not (member.agents is not None):
        awaits = awaited_in(texts, absent, member.world_size)
        return replace(record, awaits=awaits, wrote=_wrote(record.keys))
    members = _members(known, member)
    complete = complete or len(members or ()) <= MAX_SIBLINGS
    return replace(
        record,
        phase=shown_phase(known),
        protocol=known.protocol,
        group=known.group,
        # Not listed by each of ten thousand ranks.
        members=None if members == tuple(range(member.world_size)) else members,
        creates=known.group_name if known.protocol in _CREATION else "",
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
        return torch_keys.members_of(known.group_name)
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


def blocked_calls(recorder: Recorder) -> list[ActiveCall]:
    """Return the calls in flight that may block, without those inside another one."""
    return [
        call
        for call in recorder.counters.calls()
        if call.method.blocks and call.outer is None
    ]


def waited_seconds(recorder: Recorder, call: ActiveCall) -> float:
    """Return how long a call has lasted."""
    return (recorder.ticks() - call.started) / 1e9


def examine_after(timeout: float, stall_after: float) -> float:
    """Return the seconds after which a call with a timeout is examined; 0 is none.

    A call with a shorter timeout than `MIN_EXPLAINED_WAIT` gets no note. A program may
    make such calls in each step of its work, so they are examined if they are repeated.
    """
    after = stall_after * _SHARE_OF_STALL
    if timeout < MIN_EXPLAINED_WAIT:
        return after
    return min(after, timeout * _SHARE_OF_TIMEOUT)


def timeout_of(call: ActiveCall) -> timedelta:
    """Return the timeout of a call: its argument, else that of its store."""
    given = [value for value in call.args if isinstance(value, timedelta)]
    return given[-1] if given else call.state.timeout


def is_described_completely(record: BlockedRecord | None, member: Member) -> bool:
    """Return whether a record has all that its call waits for, without `complete`."""
    if record is None:
        return False
    members = member.world_size if record.members is None else len(record.members)
    return members <= MAX_SIBLINGS


def is_of_group(call: ActiveCall) -> bool:
    """Return whether a call waits for other ranks in a protocol of torch, or a barrier.

    The thread that creates a process group or is in a barrier is one of its rank.
    """
    if call.method.name == "barrier":
        return True
    keys, _ = call.method.keys_of(call.args)
    return any(
        isinstance(key, str) and meaning(key) is not None
        for key in islice(iter(keys), MAX_KEYS)
    )


def waits_for_end_of_job(recorder: Recorder) -> bool:
    """Return whether this is an agent that has finished and waits for the others.

    Its other calls wait too, for the connection: those of its heartbeats.
    """
    for call in blocked_calls(recorder):
        keys, _ = call.method.keys_of(call.args)
        found = (meaning(key) for key in keys if isinstance(key, str))
        if any(one is not None and one.ends_job for one in found):
            return True
    return False


def is_barrier(call: ActiveCall) -> bool:
    """Return whether a call is the wait of this package's barrier.

    The barrier finds out by itself who is missing.
    """
    keys, _ = call.method.keys_of(call.args)
    return any(
        isinstance(key, str) and waiting_barrier(key) is not None for key in keys
    )


def awaited_in(
    keys: Sequence[str], absent: Sequence[str], world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks that write the absent keys of one call; None if unknown.

    They are known if the call waits for one key of each rank.

    Args:
        keys: The keys that the call waits for.
        absent: Those that do not exist.
        world_size: The number of ranks.
    """
    if len(keys) != world_size or world_size < _MIN_PRESENT:
        return None
    folded = [fold_numbers(key) for key in keys]
    if len({family for family, _ in folded}) > 1:
        return None
    columns = list(zip(*(numbers for _, numbers in folded), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) != 1 or set(varying[0]) != set(range(world_size)):
        return None
    rank_of = dict(zip(keys, varying[0], strict=True))
    return tuple(sorted(rank for key in absent if (rank := rank_of[key]) is not None))


def find_awaited(
    connection: Any, key: str, blocked: Collection[int], world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks that have not written their key of a family; None if unknown.

    A number in the key is the rank if the keys of all blocked ranks exist, and those of
    all others do not.

    Args:
        connection: A connection to the store of the key.
        key: A key that does not exist.
        blocked: The blocked ranks.
        world_size: The number of ranks.
    """
    others = [rank for rank in range(world_size) if rank not in blocked]
    # Keys 0, 1 and 2 of which the next one does not exist may be counted, no matter who
    # writes them.
    if len(blocked) < _MIN_PRESENT or not others or max(blocked) < others[0]:
        return None
    _, numbers = fold_numbers(key)
    for position, number in enumerate(numbers[:_MAX_POSITIONS]):
        if number not in others:
            continue
        keys = [replace_number(key, position, rank) for rank in range(world_size)]
        own = [keys[rank] for rank in sorted(blocked)]
        if absent_keys(connection, own):
            continue
        absent = absent_keys(connection, [keys[rank] for rank in others])
        if len(absent) == len(others):
            return tuple(others)
    return None


def learned_writers(
    keys: Sequence[str],
    written: Mapping[int, Sequence[WrittenFamily]],
    world_size: int = MAX_RANKS,
) -> tuple[int, ...]:
    """Return the ranks that write these keys; none if one of them is unknown.

    One rank that wrote all keys of a family writes the next one too. If several ranks
    wrote keys with their own rank in them, the number in a key is the rank that writes
    it. If these ranks are those numbers modulo the number of ranks, it is the rank that
    follows from that.

    Args:
        keys: Keys that do not exist.
        written: The families that each rank wrote. Not all writes are observed: a rank
            that is not listed may have written a family too.
        world_size: The number of ranks.
    """
    awaited: set[int] = set()
    for key in keys:
        family, numbers = fold_numbers(key)
        writers = {
            rank: one
            for rank, families in written.items()
            for one in families
            if one.family == family
        }
        writer = _writer(numbers, writers, world_size)
        if writer is None:
            return ()
        awaited.add(writer)
    return tuple(sorted(awaited))


def _writer(
    numbers: Sequence[int | None], writers: Mapping[int, WrittenFamily], world_size: int
) -> int | None:
    if not writers:
        return None
    positions = set.intersection(*(set(one.rank_positions) for one in writers.values()))
    found = {numbers[position] for position in positions if position < len(numbers)}
    if len(writers) < _MIN_WRITERS:
        # A number of its keys was its rank: as a rule, or by chance.
        (writer,) = writers
        return writer if found <= {writer} else None
    number = found.pop() if len(found) == 1 else None
    if number is not None and number < world_size:
        return number
    return _in_turn(numbers, writers, world_size)


def _in_turn(
    numbers: Sequence[int | None], writers: Mapping[int, WrittenFamily], world_size: int
) -> int | None:
    """Return the rank whose turn it is; None if the ranks do not write in turn.

    Rank N % world_size writes key N.
    """
    last = {rank: fold_numbers(one.last_key)[1] for rank, one in writers.items()}
    found = set()
    for position, number in enumerate(numbers):
        own = {
            rank: keys[position] for rank, keys in last.items() if position < len(keys)
        }
        if number is None or len(own) < len(writers):
            continue
        known = [one for one in own.values() if one is not None]
        in_turn = all(
            one is not None and one % world_size == rank for rank, one in own.items()
        )
        # One of the next turns: a number may be a time as well.
        if in_turn and number <= max(known) + world_size:
            found.add(number % world_size)
    return found.pop() if len(found) == 1 else None
