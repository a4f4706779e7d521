"""Verdicts on a stalled job and its blocked ranks, read from the store and checked.

Every client of the store can write a verdict. The ranks that find one have published
what they wait for: all verdicts in a store are on calls, or on a server that waits for
its clients, and both have the record of a blocked rank. `find_doubt` compares a verdict
with the records and the processes that it is about.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracedstore.common import ranges
from tracedstore.coordination.rank_registry import RankInfo, without_numbers
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import MAX_SIBLINGS
from tracedstore.diagnosis.observe.blocked_record import (
    BLOCKED,
    COLLECTIVE,
    CONNECTS,
    BlockedRecord,
    CollectivePosition,
)
from tracedstore.diagnosis.observe.movement import STILL, StillRecord
from tracedstore.tools.attach.rank_endpoints import Reply
from tracedstore.tools.attach.store_snapshot import StoreSnapshot

if TYPE_CHECKING:
    from tracedstore.tools.attach.job_state import Group

# Seconds. A verdict is fresh for so long, and then while ranks that it covers wait.
_FRESH_FOR = 60.0
# Seconds by which the clocks of two hosts may differ.
_CLOCK_TOLERANCE = 10.0
# Maximum number of awaited ranks in all records. Expanding so many takes about 2 s.
_MAX_AWAITED = 8_000_000
# Methods that wait for more than the existence of keys.
_COUNTING = ("barrier", "queue_pop")
# Causes that a process which replies refutes.
_WITHOUT_PROCESS = ("gone", "host_silent", "not_started")
_MAX_DIGITS = len(str(ranges.MAX_RANKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRank:
    """A rank that is blocked in a Store call.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id.
        attempt: The attempt of torchrun that it belongs to.
        operation: The Store method, or ``connect``.
        key: The first key that it waits for; "" without one.
        phase: What it executes.
        protocol: The protocol of torch that its keys belong to; "" for others.
        awaits: The ranks that should write its keys, folded; None if unknown.
        members: The ranks of which one should write its keys, folded; None for all.
        started: When the call began, in seconds since the epoch.
        failed: The call has failed.
        key_exists: All keys that it waits for exist now.
        collective: Its position, if it waits in a collective.
    """

    rank: int
    host: str
    pid: int
    attempt: int
    operation: str
    key: str
    phase: str
    awaits: str | None
    members: str | None
    started: float
    protocol: str = ""
    failed: bool = False
    key_exists: bool = False
    collective: CollectivePosition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRecord:
    """The verdict and the blocked ranks under one key prefix.

    Attributes:
        prefix: The key prefix, with numbers replaced by ``*``.
        verdict: The latest verdict; None without one.
        blocked: The blocked ranks, in numerical order.
        failed: The ranks whose call has failed, and that have not gone on since.
    """

    prefix: str
    verdict: Verdict | None = None
    blocked: tuple[BlockedRank, ...] = ()
    failed: tuple[BlockedRank, ...] = ()

    def fresh_verdict(self, now: float) -> Verdict | None:
        """Return the verdict, unless the wait that it is about has ended.

        It is fresh for a minute, and then while a rank that it covers is still in the
        call that began before the verdict.
        """
        if self.verdict is None:
            return None
        if abs(now - self.verdict.time) < _FRESH_FOR or self.still_waiting():
            return self.verdict
        return None

    def still_waiting(self) -> bool:
        """Return whether a rank that the verdict covers is still in that call."""
        return any(not one.failed for one in self.covered())

    def covered(self) -> list[BlockedRank]:
        """Return the records that are of the wait that the verdict is about."""
        if self.verdict is None:
            return []
        ranks = frozenset(self.verdict.waiting_ranks)
        until = self.verdict.time + _CLOCK_TOLERANCE
        return [
            one
            for one in (*self.blocked, *self.failed)
            if one.rank in ranks and one.started <= until
        ]


def is_still_key(key: str) -> bool:
    """Return whether a key holds the record of a rank in which nothing moves."""
    return _rank_of(key, STILL) is not None


def read_still(snapshot: StoreSnapshot, groups: "Iterable[Group]") -> list[StillRecord]:
    """Return the records of processes that are registered as the rank still."""
    processes = {
        (info.rank, info.host, info.pid) for group in groups for info in group.ranks
    }
    found = {}
    for key in sorted(filter(is_still_key, snapshot.list_keys())):
        record = StillRecord.from_bytes(snapshot.get(key))
        if record is not None:
            process = record.rank, record.host, record.pid
            if process in processes:
                found[process] = record
    return list(found.values())


def is_stall_key(key: str) -> bool:
    """Return whether a key holds a verdict or the record of a blocked rank."""
    return _verdict_prefix(key) is not None or _blocked_rank(key) is not None


class StoredStalls:
    """All verdicts and blocked ranks in a store, within `_MAX_AWAITED`.

    A process that was killed in a blocked call leaves its record. A record is omitted
    if another process has registered as its rank since. Awaited ranks of records are
    kept as folded text: every rank of a large job may wait for all others, and expanded
    these are gigabytes.

    Args:
        snapshot: The contents of the store.
        registered: The registered ranks, by the prefix of their keys.

    Attributes:
        stalls: The verdicts and blocked ranks, by prefix.
        invalid_count: Values that are neither a verdict nor a record.
        unread_count: Values that were not parsed, because the others have too many
            awaited ranks.
    """

    def __init__(
        self, snapshot: StoreSnapshot, registered: Mapping[str, Mapping[int, RankInfo]]
    ) -> None:
        self.invalid_count = 0
        self.unread_count = 0
        self._keys = snapshot.keys
        self._verdicts: dict[str, Verdict] = {}
        self._blocked: dict[str, dict[int, BlockedRank]] = {}
        self._folded: dict[tuple[int, ...], str] = {}
        self._remaining = _MAX_AWAITED
        keys = sorted(snapshot.list_keys())
        for key in keys:
            if (prefix := _verdict_prefix(key)) is not None:
                self._add_verdict(without_numbers(prefix), snapshot.get(key))
        for key in keys:
            if (found := _blocked_rank(key)) is not None:
                prefix, rank = found
                info = registered.get(without_numbers(prefix), {}).get(rank)
                self._add_record(prefix, rank, snapshot.get(key), info)
        self.stalls = tuple(
            StallRecord(
                prefix=prefix,
                verdict=self._verdicts.get(prefix),
                blocked=self._ranks(prefix, failed=False),
                failed=self._ranks(prefix, failed=True),
            )
            for prefix in sorted(self._verdicts.keys() | self._blocked.keys())
            if prefix in self._verdicts or self._ranks(prefix, failed=False)
        )

    def _add_verdict(self, prefix: str, value: bytes) -> None:
        """Keep the latest verdict of a prefix."""
        if not self._is_read(value):
            return
        verdict = Verdict.from_bytes(value)
        if verdict is None:
            self.invalid_count += 1
            return
        self._remaining -= len(verdict.awaited_ranks) + len(verdict.waiting_ranks)
        before = self._verdicts.get(prefix)
        if before is None or before.time <= verdict.time:
            self._verdicts[prefix] = verdict

    def _add_record(
        self, prefix: str, rank: int, value: bytes, info: RankInfo | None
    ) -> None:
        """Keep the latest record of a rank; not that of a process that was replaced.

        The prefix is that of its key, with its numbers.
        """
        if not self._is_read(value):
            return
        record = BlockedRecord.from_bytes(value)
        if record is None or record.rank != rank:
            self.invalid_count += 1
            return
        if info and _is_replaced(record, info):
            return
        group = self._blocked.setdefault(without_numbers(prefix), {})
        before = group.get(rank)
        if before is None or (before.attempt, before.started) <= (
            record.attempt,
            record.started,
        ):
            group[rank] = self._to_rank(record, prefix)

    def _ranks(self, prefix: str, *, failed: bool) -> tuple[BlockedRank, ...]:
        """Return the blocked ranks of a prefix, or those whose call has failed."""
        ranks = self._blocked.get(prefix, {})
        return tuple(one for _, one in sorted(ranks.items()) if one.failed is failed)

    def _is_read(self, value: bytes) -> bool:
        """Return whether to parse a value; an empty one is of a call that has ended."""
        if self._remaining <= 0 and value:
            self.unread_count += 1
        return self._remaining > 0 and value != b""

    def _to_rank(self, record: BlockedRecord, prefix: str) -> BlockedRank:
        # Its store may have another prefix than its registry. Then the keys are not
        # found, and what it says is not doubted.
        exist = bool(record.keys) and record.operation not in _COUNTING
        return BlockedRank(
            rank=record.rank,
            host=record.host,
            pid=record.pid,
            attempt=record.attempt,
            operation=record.operation,
            key=record.keys[0] if record.keys else "",
            phase=record.phase,
            awaits=self._fold(record.awaits),
            members=self._fold(record.members),
            started=record.started,
            protocol=record.protocol,
            failed=record.failed is not None,
            key_exists=exist and self._keys.issuperset(prefix + k for k in record.keys),
            collective=record.collective,
        )

    def _fold(self, ranks: tuple[int, ...] | None) -> str | None:
        if ranks is None:
            return None
        if ranks not in self._folded:
            self._remaining -= len(ranks)
            self._folded[ranks] = ranges.fold(ranks)
        return self._folded[ranks]


def _is_replaced(record: BlockedRecord, info: RankInfo) -> bool:
    """Return whether another process has registered as the rank since."""
    is_other = (record.host, record.pid) != (info.host, info.pid)
    return is_other and record.started <= info.started


def _verdict_prefix(key: str) -> str | None:
    """Return the prefix of a verdict's key; None for other keys."""
    prefix = key.removesuffix(VERDICT)
    is_verdict = prefix != key and (not prefix or prefix.endswith("/"))
    return prefix if is_verdict else None


def _blocked_rank(key: str) -> tuple[str, int] | None:
    """Return the prefix and the rank of a record's key; None for other keys."""
    return _rank_of(key, BLOCKED)


def _rank_of(key: str, kind: str) -> tuple[str, int] | None:
    prefix, separator, number = key.rpartition(f"{kind}/")
    if not separator or (prefix and not prefix.endswith("/")):
        return None
    is_rank = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
    return (prefix, int(number)) if is_rank else None


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


def find_doubt(stall: StallRecord, verdict: Verdict, processes: Processes) -> str:
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
    if reply is None or reply.status is None or one.failed or one.operation == CONNECTS:
        return True
    if one.protocol == COLLECTIVE:
        return reply.status.collective != ""
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
