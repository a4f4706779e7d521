"""Waits in collectives: whom each waits for, and why no rank of the group goes on.

A rank that waits in a collective waits for the members of its group that have not
called it. That is an edge like that of a rank which waits for a key, so that both are
in one graph: `resolve` finds these edges, from the positions of all ranks. Where all
that could act have called something, `judge_calls` compares what they called.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tracedstore.common import ranges
from tracedstore.common.causes import REMEDIES
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import (
    MAX_AWAITED,
    WRITES_KEY,
    AwaitedRank,
    Suspects,
    Verdict,
    describe_waiting,
    find_cycle,
    judge,
    name_blocked,
)
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    Called,
    CollectivePosition,
)
from tracedstore.local.facts import ProcessFacts

_SEND: Final = ("send", "isend")
_RECEIVE: Final = ("recv", "irecv")
# Collectives that end on no rank before all ranks have called them.
NEED_ALL: Final = frozenset(
    ("all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter")
)
# Sides of a mismatch that are described.
_MAX_SIDES: Final = 4
DIVERGED_REMEDY: Final = "make all ranks call the same collectives in the same order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of ranks besides their records.

    Attributes:
        entered: The ranks that have called a collective, by group and number.
        called: By rank, the last collective of each group that it has called.
        ended: The ranks whose processes have ended.
    """

    entered: Mapping[tuple[str, int], Collection[int]] = field(default_factory=dict)
    called: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    ended: Collection[int] = ()


def resolve(
    blocked: Mapping[int, BlockedRecord], world_size: int, known: Known | None = None
) -> dict[int, BlockedRecord]:
    """Return the records, with the ranks that each collective waits for.

    Args:
        blocked: The records of the blocked ranks.
        world_size: The number of ranks.
        known: What is known besides.
    """
    calls = {
        rank: record
        for rank, record in blocked.items()
        if record.collective is not None
    }
    if not calls:
        return dict(blocked)
    reached = _reached(calls.values())
    found = dict(blocked)
    for rank, record in calls.items():
        awaits = _awaited(record, blocked, world_size, known or Known(), reached)
        found[rank] = replace(record, awaits=awaits)
    return found


def _reached(records: Iterable[BlockedRecord]) -> dict[str, int]:
    """Return the number in each group up to which all ranks have called everything.

    A collective that needs all ranks has ended somewhere. The recorder of a rank that
    looks as if it had not come so far is late: its watchdog hangs.
    """
    found: dict[str, int] = {}
    for record in records:
        position = record.collective
        if position is None:
            continue
        for call in position.recent:
            if call.operation in NEED_ALL:
                number = max(found.get(position.group, 0), call.number)
                found[position.group] = number
    return found


def _awaited(
    record: BlockedRecord,
    blocked: Mapping[int, BlockedRecord],
    world_size: int,
    known: Known,
    reached: Mapping[str, int],
) -> tuple[int, ...] | None:
    position = record.collective
    if position is None:
        return record.awaits
    if position.operation in (*_SEND, *_RECEIVE):
        return _awaited_peers(record, blocked)
    members = range(world_size) if record.members is None else record.members
    awaits = tuple(
        rank
        for rank in sorted(members)
        if rank != record.rank
        and not _has_called(rank, position, blocked.get(rank), known, reached)
    )
    if position.operation in NEED_ALL:
        return awaits
    # A process may have done its part of a broadcast, and ended then. Like the writer
    # of a key, it is named where no other is left.
    return tuple(rank for rank in awaits if rank not in known.ended) or awaits


def _awaited_peers(
    record: BlockedRecord, blocked: Mapping[int, BlockedRecord]
) -> tuple[int, ...] | None:
    """Return the peers that are not in the other half of the operation."""
    if record.awaits is None or record.collective is None:
        return record.awaits
    halves = _RECEIVE if record.collective.operation in _SEND else _SEND
    left = []
    for rank in record.awaits:
        other = blocked.get(rank)
        is_there = (
            other is not None
            and other.collective is not None
            and other.collective.operation in halves
            and other.collective.group == record.collective.group
            and record.rank in (other.awaits or ())
        )
        if not is_there:
            left.append(rank)
    return tuple(left)


def _has_called(
    rank: int,
    position: CollectivePosition,
    record: BlockedRecord | None,
    known: Known,
    reached: Mapping[str, int],
) -> bool:
    """Return whether a rank has called the collective of a position."""
    group, number = position.group, position.number
    other = None if record is None else record.collective
    is_same_group = other is not None and other.group == group
    if number is None:
        return (
            other is not None
            and is_same_group
            and other.operation == position.operation
        )
    if number <= reached.get(group, 0):
        return True
    called = known.called.get(rank, {}).get(group, 0)
    if other is not None:
        called = max(called, other.called.get(group, 0))
    if called >= number or rank in known.entered.get((group, number), ()):
        return True
    if other is None or not is_same_group:
        return False
    if other.number is None:
        return other.operation == position.operation
    return other.number >= number


def judge_waits(
    blocked: Mapping[int, BlockedRecord],
    suspects: Suspects,
    world_size: int,
    answers: Mapping[int, ProcessFacts],
    registered: Mapping[int, RankInfo],
    host_of: Callable[[int], str],
    now: float,
) -> Verdict:
    """Judge whom the blocked ranks wait for, in collectives and in the store.

    The arguments are those of `judge`, and the records are resolved.
    """
    has_calls = any(record.collective is not None for record in blocked.values())
    if has_calls and not suspects.all_ranks:
        found = judge_calls(describe_waiting(blocked, now), blocked, world_size)
        if found is not None:
            return found
    verdict = judge(blocked, suspects, world_size, answers, registered, host_of, now)
    return _with_call(verdict, blocked, world_size) if has_calls else verdict


def describe_call(position: CollectivePosition | Called) -> str:
    """Return ``all_reduce 2501 [10] Float``."""
    number = str(position.number) if position.number else ""
    parts = (position.operation, number, position.sizes, position.dtype)
    return " ".join(filter(None, parts))


def call_sites(
    records: Mapping[int, BlockedRecord], verb: str = "called it at"
) -> list[str]:
    """Return which ranks called something where, in one text for each line."""
    by_place: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if record.collective is not None and record.collective.place:
            by_place.setdefault(record.collective.place, []).append(rank)
    return [
        f"{ranges.ranks_text(ranks)} {verb} {place}"
        for place, ranks in list(by_place.items())[:_MAX_SIDES]
    ]


def _with_call(
    verdict: Verdict, blocked: Mapping[int, BlockedRecord], world_size: int
) -> Verdict:
    """Return a verdict on the collective that waits for the ranks that it names.

    Of many groups that wait, that is the one at the head. A verdict on a wait for a key
    stays as it is.
    """
    named = set(verdict.awaited_ranks)
    waiting = [
        record
        for record in blocked.values()
        if not named or not named.isdisjoint(record.awaits or ())
    ]
    # A rank that waits for these alone is nearer than one that waits for more.
    first = min(
        waiting,
        key=lambda one: (len(set(one.awaits or ()) - named), one.started, one.rank),
        default=None,
    )
    if first is None or first.collective is None:
        return verdict
    position = first.collective
    together = {
        rank: record
        for rank, record in blocked.items()
        if record.collective is not None
        and (
            record.collective.group,
            record.collective.number,
            record.collective.operation,
        )
        == (position.group, position.number, position.operation)
    }
    return replace(
        _of_call(verdict, first, world_size),
        evidence=(
            *(
                "each awaited rank has not called it" if one == WRITES_KEY else one
                for one in verdict.evidence
            ),
            *call_sites(together),
        ),
    )


def _of_call(verdict: Verdict, record: BlockedRecord, world_size: int) -> Verdict:
    """Return a verdict with the fields of a call."""
    position = record.collective
    if position is None:
        return verdict
    members = range(world_size) if record.members is None else record.members
    return replace(
        verdict,
        phase=position.phase,
        key="",
        group=position.group,
        group_ranks=tuple(members),
        sequence=position.number,
        collective=position.operation,
        sizes=position.sizes,
    )


def judge_calls(
    waiting: Verdict, blocked: Mapping[int, BlockedRecord], world_size: int
) -> Verdict | None:
    """Judge a stall in which every rank that could act waits itself.

    Args:
        waiting: A verdict with the waiting side only.
        blocked: The records of the blocked ranks, resolved.
        world_size: The number of ranks.

    Returns:
        The verdict; None if no collective is a reason.
    """
    groups: dict[tuple[str, tuple[int, ...] | None], dict[int, BlockedRecord]] = {}
    for rank, record in blocked.items():
        if record.collective is not None:
            key = record.collective.group, record.members
            groups.setdefault(key, {})[rank] = record
    # The group that has waited for longest: it may be why the others wait.
    ordered = sorted(
        groups.values(), key=lambda some: min(one.started for one in some.values())
    )
    for some in ordered:
        verdict = _judge_mismatch(waiting, some, world_size)
        if verdict is not None:
            return verdict
    cycle = find_cycle(blocked, world_size)
    if any(blocked[rank].collective is not None for rank in cycle):
        return _judge_order(waiting, blocked, cycle, world_size)
    for some in ordered:
        # A rank whose call has failed may have gone on.
        if all(one.awaits == () and one.failed is None for one in some.values()):
            return _all_entered(waiting, some, world_size)
    return None


def _judge_mismatch(
    waiting: Verdict, some: Mapping[int, BlockedRecord], world_size: int
) -> Verdict | None:
    """Judge the ranks of one group that have called different things."""
    reached = _reached(some.values())
    numbers = [
        record.collective.number
        for record in some.values()
        if record.collective is not None
        and record.collective.number is not None
        and record.collective.number > reached.get(record.collective.group, 0)
    ]
    number = min(numbers, default=None)
    calls: dict[int, Called | CollectivePosition] = {}
    for rank, record in some.items():
        call = _call_at(record, number)
        if call is not None:
            calls[rank] = call
    sides = _sides(calls)
    if len(sides) < 2:  # noqa: PLR2004 - one side is no mismatch
        return None
    # The ranks that most others do not follow are the odd ones.
    sides.sort(key=len, reverse=True)
    most = len(sides[0])
    odd = [side for side in sides if len(side) < most] or sides
    named = sorted(rank for side in odd for rank in side)
    usual = sides[0] if odd is not sides else None
    skipped = None if usual is None else _skipped(some, calls, usual, odd)
    first = some[min(usual or sides[0])]
    return replace(
        _of_call(waiting, first, world_size),
        cause="mismatch",
        awaited=tuple(
            AwaitedRank(
                rank=rank,
                host=some[rank].host,
                pid=some[rank].pid,
                cause="mismatch",
                doing=_doing(some[rank], calls[rank], skipped),
            )
            for rank in named[:MAX_AWAITED]
        ),
        awaited_ranks=tuple(named),
        evidence=tuple(_side_text(side, some, calls) for side in sides[:_MAX_SIDES]),
        remedy=REMEDIES["mismatch"],
    )


def _judge_order(
    waiting: Verdict,
    blocked: Mapping[int, BlockedRecord],
    cycle: Sequence[int],
    world_size: int,
) -> Verdict:
    """Judge ranks that wait for each other, each in another group or in the store."""
    groups = Counter(record.group for record in blocked.values())
    most = max(groups.values())
    odd = [rank for rank in sorted(blocked) if groups[blocked[rank].group] < most]
    named = name_blocked(waiting, blocked, odd or list(cycle), "diverged")
    first = min(
        (blocked[rank] for rank in cycle if blocked[rank].collective is not None),
        key=lambda one: (one.started, one.rank),
    )
    return replace(_of_call(named, first, world_size), remedy=DIVERGED_REMEDY)


def _call_at(
    record: BlockedRecord, number: int | None
) -> Called | CollectivePosition | None:
    """Return what a rank called with a number: what it waits in, or has ended."""
    position = record.collective
    if position is None:
        return None
    if position.number is None or number is None or position.number == number:
        return position
    return next((call for call in position.recent if call.number == number), None)


def _sides(calls: Mapping[int, Called | CollectivePosition]) -> list[list[int]]:
    """Return the ranks that may be in the same collective, together."""
    sides: list[list[int]] = []
    for rank in sorted(calls):
        for side in sides:
            if all(_match(calls[rank], calls[other]) for other in side):
                side.append(rank)
                break
        else:
            sides.append([rank])
    return sides


def _match(
    one: Called | CollectivePosition, other: Called | CollectivePosition
) -> bool:
    if {one.operation, other.operation} <= {*_SEND, *_RECEIVE}:
        return True  # with each other, or with different ranks
    return one.operation == other.operation and all(
        not (first and second) or first == second
        for first, second in ((one.sizes, other.sizes), (one.dtype, other.dtype))
    )


def _skipped(
    some: Mapping[int, BlockedRecord],
    calls: Mapping[int, Called | CollectivePosition],
    usual: Sequence[int],
    odd: Sequence[Sequence[int]],
) -> str:
    """Return what odd ranks skipped, if they called what the others call next."""
    position = some[usual[0]].collective
    expected = None if position is None else position.expected
    if position is None or expected is None:
        return ""
    if all(_match(calls[side[0]], expected) for side in odd):
        return f"skipped {describe_call(calls[usual[0]])}"
    return ""


def _doing(
    record: BlockedRecord, call: Called | CollectivePosition, skipped: str | None
) -> str:
    position = record.collective
    place = f" at {position.place}" if position and position.place else ""
    called = f"called {describe_call(call)}{place if call is position else ''}"
    return f"{skipped}: {called}" if skipped else called


def _side_text(
    side: Sequence[int],
    some: Mapping[int, BlockedRecord],
    calls: Mapping[int, Called | CollectivePosition],
) -> str:
    places = Counter(
        record.collective.place
        for rank in side
        if (record := some[rank]).collective is not None and record.collective.place
    )
    place = f" at {places.most_common(1)[0][0]}" if places else ""
    return f"{ranges.ranks_text(side)}: {describe_call(calls[side[0]])}{place}"


def _all_entered(
    waiting: Verdict, some: Mapping[int, BlockedRecord], world_size: int
) -> Verdict:
    """Judge a collective that all ranks of its group have called."""
    reached = _reached(some.values())

    def order(record: BlockedRecord) -> tuple[bool, float, int]:
        found = record.collective
        number = None if found is None else found.number
        is_stale = number is not None and number <= reached.get(
            "" if found is None else found.group, 0
        )
        return is_stale, record.started, record.rank

    first = min(some.values(), key=order)
    verdict = _of_call(waiting, first, world_size)
    count = len(verdict.group_ranks)
    position = first.collective
    peers = position is not None and position.operation in (*_SEND, *_RECEIVE)
    known = (
        f"both ranks are in it: {ranges.ranks_text(some)}"
        if peers
        else f"all {count} ranks have called it, and it does not end"
    )
    return replace(
        verdict,
        cause="all_entered",
        known=known,
        evidence=tuple(call_sites(some)),
        remedy=REMEDIES["all_entered"],
    )
