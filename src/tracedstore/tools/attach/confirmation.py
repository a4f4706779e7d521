"""Checks a verdict against the records and the processes that it is about.

Every client of the store can write a verdict. The ranks that find one have published
what they wait for: all verdicts in a store are on calls, or on a server that waits for
its clients, and both have the record of a blocked rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tracedstore.common import ranges
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import MAX_SIBLINGS
from tracedstore.tools.attach.inflight_client import Reply
from tracedstore.tools.attach.stalled_ranks import BlockedRank, Stall

# What a rank does that is in no Store call while it waits.
_CONNECTS = "connect"
# Causes that a process which replies refutes.
_WITHOUT_PROCESS = ("not_started", "gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """What is known about the processes of a job.

    Attributes:
        world_size: The number of ranks; 0 if none has registered.
        registered: The ranks that have registered.
        replies: The replies of registered ranks.
    """

    world_size: int
    registered: Mapping[int, RankInfo]
    replies: Mapping[RankInfo, Reply]

    def reply_of(self, rank: int) -> Reply | None:
        """Return the reply of a rank that has responded."""
        info = self.registered.get(rank)
        reply = None if info is None else self.replies.get(info)
        return reply if reply is not None and reply.status is not None else None


def find_doubt(stall: Stall, verdict: Verdict, processes: Processes) -> str:
    """Return why a verdict is not confirmed, "" if it is.

    It is if a rank that it covers is in the call, or was until that failed, and if
    those ranks wait for all ranks that it names.

    Args:
        stall: The records of blocked ranks.
        verdict: The verdict.
        processes: The processes of the job.
    """
    records = [
        one
        for one in stall.covered()
        if not one.key_exists and _may_wait(one, verdict, processes)
    ]
    if not records:
        return "no rank that it says waits is blocked in such a call"
    named = set(verdict.awaited_ranks) | {one.rank for one in verdict.awaited}
    if others := sorted(named - _awaited(records, verdict, processes)):
        return f"no blocked rank waits for {ranges.ranks_text(others)}"
    alive = [
        one.rank
        for one in verdict.awaited
        if one.cause in _WITHOUT_PROCESS
        and not verdict.agents
        and processes.reply_of(one.rank) is not None
    ]
    if alive:
        return f"{ranges.ranks_text(alive)} responded just now"
    return ""


def _may_wait(one: BlockedRank, verdict: Verdict, processes: Processes) -> bool:
    """Return whether what is known about a process allows what its record says."""
    if verdict.agents:  # which do not register
        return True
    if one.rank not in processes.registered:
        return False
    reply = processes.reply_of(one.rank)
    if (
        reply is None
        or reply.status is None
        or one.failed
        or one.operation == _CONNECTS
    ):
        return True
    return bool(reply.status.in_flight)


def _awaited(
    records: Iterable[BlockedRank], verdict: Verdict, processes: Processes
) -> set[int]:
    """Return the ranks that blocked ranks wait for, and these themselves.

    A rank that waits may be named: the waits of several may be a circle.
    """
    found: set[int] = set()
    waits: set[tuple[str | None, str | None, bool]] = set()
    for one in records:
        found.add(one.rank)
        waits.add((one.awaits, one.members, one.protocol != ""))
    for awaits, members, is_torch in waits:
        group: Sequence[int] = range(processes.world_size)
        if members is not None:
            group = ranges.unfold_shared(members)
        elif verdict.agents:
            group = verdict.awaited_ranks
        if awaits is None:
            found.update(group)
            continue
        found.update(ranges.unfold_shared(awaits))
        # In a large group of torch, a record has the first absent rank only.
        if is_torch and len(group) > MAX_SIBLINGS:
            found.update(group)
    return found
