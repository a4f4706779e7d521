"""Reads dumps of torch's Flight Recorder, and judges whom the collectives waited for.

NCCL's watchdog writes a dump of each rank when a collective times out. The name of the
file is a prefix and the rank: ``comm_lib_trace_rank_3``, ``nccl_trace_rank_3``. It is a
pickle of what the live diagnosis reads as JSON, with the stack of each call. So the
same code judges it, and the job need not have been traced.

A dump says what a rank had called when it was written. Of a rank without a dump nothing
is known, and gloo's dumps do not say which ranks a group has. Then nobody is named.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tracedstore.common import plain_pickle
from tracedstore.common.ranges import MAX_RANKS, ranks_text
from tracedstore.diagnosis.judgement.collective_waits import (
    NEED_ALL,
    Known,
    describe_call,
    judge_waits,
    resolve,
)
from tracedstore.diagnosis.judgement.verdict import Verdict, find_suspects
from tracedstore.diagnosis.observe import flight_recorder
from tracedstore.diagnosis.observe.blocked_record import COLLECTIVE, BlockedRecord
from tracedstore.diagnosis.observe.flight_recorder import Entry, GroupRecord
from tracedstore.local.facts import Frame, ProcessFacts

# The first byte of a pickle, and of no text in UTF-8.
PICKLE_START: Final = b"\x80"
# A ring of 2,000 entries with 20 frames each takes 2 MB and 700,000 opcodes.
_FORM: Final = plain_pickle.Form(
    noun="a dump of Flight Recorder",
    opcodes=plain_pickle.DATA | {"BINFLOAT"},
    max_bytes=16 * 1024 * 1024,
    max_opcodes=2_500_000,
    max_containers=300_000,
    # All ranks of a large job in one text.
    max_text=1024 * 1024,
)
MAX_BYTES: Final = _FORM.max_bytes
_RANK_IN_NAME: Final = re.compile(r"(\d{1,7})(?:\.gz|\.pickle|\.pkl)?$")
_RANKS: Final = re.compile(r"[\[\], 0-9]*")
_MAX_GROUPS: Final = 1024
_MAX_FRAMES: Final = 64
_MAX_NAME: Final = 100
_MAX_LATER: Final = 64
# Seconds by which the clocks of hosts may differ.
_CLOCKS: Final = 5.0
# Seconds between two attempts of a job, at least.
_ATTEMPT: Final = 60.0
_DEFAULT: Final = "default_pg"
_OF_TORCH: Final = re.compile(r"/torch/(?:distributed|nn|utils|_[a-z]|ops)|^<frozen ")
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3")
_REMEDY: Final = (
    "read the log of each awaited rank at that time: it wrote its dump, and had not"
    " called it"
)
_INCOMPLETE: Final = "name the dumps and the logs of all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDump:
    """What Flight Recorder had of one rank.

    Attributes:
        rank: The rank.
        written: When the file was written, in seconds since the epoch; 0 if it is
            older than its entries, or much newer.
        records: What it has about each process group.
        members: The ranks of each group, in the order of their ranks in the group; not
            those of gloo's groups, which a dump does not have.
    """

    rank: int
    written: float = 0.0
    records: Mapping[str, GroupRecord]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def last_created(self) -> float:
        """When the last call of these was made, in seconds since the epoch."""
        return max((one.created for one in self.entries()), default=0.0)

    @property
    def called(self) -> dict[str, int]:
        """The last collective that the rank has called, by group."""
        return {name: record.last_called for name, record in self.records.items()}

    def description(self, group: str) -> str:
        """Return the description of a group; "" without one."""
        record = self.records.get(group)
        found = [] if record is None else [*_entries_of(record)]
        return next((one.description for one in found if one.description), "")

    def entries(self) -> Iterable[Entry]:
        """Return the calls that it still has: the last that ended, and the pending."""
        for record in self.records.values():
            yield from _entries_of(record)


@dataclass(slots=True)
class DumpedPosition:
    """Ranks with the same position in a group.

    Attributes:
        group: The group.
        call: The collective.
        is_pending: It had not ended.
        place: Where it was called; "" if it is unknown.
        ranks: The ranks.
        since: When the first of them called it.
    """

    group: str
    call: str
    is_pending: bool
    place: str
    ranks: list[int]
    since: float


def read_dump(name: str, data: bytes, written: float) -> RankDump:
    """Read a dump.

    Args:
        name: The name of its file.
        data: Its bytes.
        written: When it was written, in seconds since the epoch.

    Raises:
        ValueError: It is no dump, or too large; the text has the reason.
    """
    found = _RANK_IN_NAME.search(Path(name).name)
    value = plain_pickle.load(data, _FORM)
    has_entries = isinstance(value, dict) and isinstance(value.get("entries"), list)
    if not has_entries:
        raise ValueError("a pickle without entries of Flight Recorder")
    if found is None or int(found[1]) >= MAX_RANKS:
        raise ValueError("the name of a dump must end with the rank")
    records = flight_recorder.records_of(
        [flight_recorder.entries_of(value["entries"], _place_of)]
    )
    dump = RankDump(
        rank=int(found[1]), records=records, members=_members_of(value.get("pg_config"))
    )
    # A copy has the time at which it was made, if that is not kept.
    longest = max((one.timeout for one in dump.entries()), default=0.0)
    age = written - dump.last_created
    is_known = -_CLOCKS <= age <= max(longest, 1.0) * 2
    return replace(dump, written=written if is_known else 0.0)


def _members_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group that has any; gloo's has none, nor a name."""
    found: dict[str, tuple[int, ...]] = {}
    if not isinstance(config, dict):
        return found
    for name, value in list(config.items())[:_MAX_GROUPS]:
        text = value.get("ranks") if isinstance(value, dict) else None
        if isinstance(name, str) and isinstance(text, str) and _RANKS.fullmatch(text):
            numbers = [int(one[:18]) for one in re.findall(r"\d+", text)]
            if name and numbers and max(numbers) < MAX_RANKS:
                found[flight_recorder.shown_name(name)] = tuple(dict.fromkeys(numbers))
    return found


def _place_of(frames: Any) -> str:
    """Return the line of the program in a stack: the innermost one of no library.

    Without one, that of the library that called torch.
    """
    library = ""
    for frame in frames[:_MAX_FRAMES] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if not (isinstance(file, str) and isinstance(line, int)):
            continue
        if _OF_TORCH.search(file) and _LIBRARY.search(file):
            continue
        function = name if isinstance(name, str) else "?"
        place = str(
            Frame(
                file="/".join(file.split("/")[-2:])[-_MAX_NAME:],
                line=line,
                function=function[:_MAX_NAME],
            )
        )
        if not (_LIBRARY.search(file) or file.startswith("<frozen ")):
            return place
        library = library or place
    return library


def _entries_of(record: GroupRecord) -> Iterable[Entry]:
    yield from record.recent
    if record.pending is not None:
        yield record.pending


def judge_dumps(
    dumps: Mapping[int, RankDump], world_size: int, host_of: Callable[[int], str]
) -> Verdict | None:
    """Judge whom the ranks waited for when the dumps were written.

    Args:
        dumps: The dumps, by rank.
        world_size: The number of ranks, 0 if the logs do not have it.
        host_of: Returns the host of a rank, "" if it is unknown.

    Returns:
        The verdict, of the time of the last dump; None if no collective was pending.
    """
    known_members = {
        name: some for dump in dumps.values() for name, some in dump.members.items()
    }
    everyone = _ranks_of_default(dumps, known_members)
    has_size = bool(everyone) or world_size > max(dumps, default=0)
    if everyone:
        world_size = max(everyone) + 1
    world_size = max(world_size, max(dumps, default=0) + 1)
    blocked = {}
    for rank, dump in dumps.items():
        record = _blocked(dump, dumps, known_members, world_size, host_of(rank))
        if record is not None:
            blocked[rank] = record
    if not blocked:
        return None
    old = _older({rank: dumps[rank] for rank in blocked}, dumps)
    unknown = frozenset((set(range(world_size)) - dumps.keys()) | old)
    # What is unknown of ranks accuses nobody.
    entered = {
        (one.collective.group, one.collective.number): unknown
        for one in blocked.values()
        if one.collective is not None and one.collective.number is not None
    }
    known = Known(
        entered=entered, called={rank: dump.called for rank, dump in dumps.items()}
    )
    resolved = {
        rank: replace(record, awaits=_without(record.awaits, unknown))
        for rank, record in resolve(blocked, world_size, known).items()
    }
    suspects = find_suspects(resolved, world_size)
    first = min(resolved.values(), key=lambda one: (one.started, one.rank))
    group = "" if first.collective is None else first.collective.group
    answers = {
        rank: _facts(dumps[rank], group, host_of(rank))
        for rank in suspects.all_ranks
        if rank in dumps
    }
    now = _time_of(dumps, resolved)
    verdict = judge_waits(resolved, suspects, world_size, answers, {}, host_of, now)
    verdict = replace(
        verdict,
        # A dump has no process ids.
        awaited=tuple(replace(one, pid=None) for one in verdict.awaited),
        remedy=_REMEDY if verdict.cause == "busy" else verdict.remedy,
    )
    is_default = any(
        dump.description(verdict.group) == _DEFAULT for dump in dumps.values()
    )
    is_known = verdict.group in known_members or (is_default and has_size)
    return _doubtful(verdict, unknown, old, is_known=is_known)


def _ranks_of_default(
    dumps: Mapping[int, RankDump], members: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the ranks of the job, () if no dump has them."""
    for name, some in members.items():
        if any(dump.description(name) == _DEFAULT for dump in dumps.values()):
            return some
    return ()


def _without(
    awaits: tuple[int, ...] | None, unknown: frozenset[int]
) -> tuple[int, ...] | None:
    return awaits and tuple(rank for rank in awaits if rank not in unknown)


def _blocked(
    dump: RankDump,
    dumps: Mapping[int, RankDump],
    known_members: Mapping[str, tuple[int, ...]],
    world_size: int,
    host: str,
) -> BlockedRecord | None:
    """Return what a rank waits in: the oldest call that has not ended."""
    pending = [
        (record.pending.created, name, record, record.pending)
        for name, record in dump.records.items()
        if record.pending is not None and not _has_ended(record.pending, dumps)
    ]
    if not pending:
        return None
    _, name, record, entry = min(pending, key=lambda one: one[:2])
    members: tuple[int, ...] | None = known_members.get(name)
    if members is None and entry.description != _DEFAULT:
        members = tuple(rank for rank in sorted(dumps) if name in dumps[rank].records)
    peers: tuple[int, ...] | None = None
    if entry.is_p2p:
        in_group = range(world_size) if members is None else members
        peer = len(in_group) if entry.peer is None else entry.peer
        peers = tuple(in_group[peer : peer + 1])
    if members is not None and set(members) == set(range(world_size)):
        members = None
    position = record.position_of(
        entry,
        place=entry.place,
        called=dict(list(dump.called.items())[:_MAX_LATER]),
    )
    return BlockedRecord(
        rank=dump.rank,
        host=host,
        pid=0,
        operation=position.operation,
        keys=(),
        phase=position.phase,
        protocol=COLLECTIVE,
        group="" if entry.is_p2p else f"{name}/{position.number}",
        members=None if members is None else tuple(sorted(members)),
        awaits=peers,
        started=entry.created,
        collective=position,
    )


def _has_ended(entry: Entry, dumps: Mapping[int, RankDump]) -> bool:
    """Return whether others have ended it, or a later one, which all ranks are in.

    Then the record is late, because the watchdog of its rank hangs.
    """
    return not entry.is_p2p and any(
        done.number >= entry.number and done.signature.operation in NEED_ALL
        for dump in dumps.values()
        if entry.group in dump.records
        for done in dump.records[entry.group].recent
    )


def _older(waiting: Mapping[int, RankDump], dumps: Mapping[int, RankDump]) -> set[int]:
    """Return the ranks whose dumps are of before the wait, as of an earlier attempt.

    Each attempt writes the same names, and a copy may have the time of the copy. A rank
    that is late has called something at about the time of what the others have ended.
    """
    entries = [one for dump in waiting.values() for one in dump.entries()]
    started = min((one.created for one in entries if not one.retired), default=0.0)
    ended = [one.created for one in entries if one.retired and one.created <= started]
    return {
        rank
        for rank, dump in dumps.items()
        if 0 < dump.written < started - _CLOCKS
        or (ended and dump.last_created < min(ended) - _ATTEMPT)
    }


def _facts(dump: RankDump, group: str, host: str) -> ProcessFacts:
    """Return what a dump says about the process of a rank that is not in a call."""
    record = dump.records.get(group)
    if record is None or not record.recent:
        detail = f"has called nothing in group {group}"
    else:
        last = record.recent[-1]
        place = f" at {last.place}" if last.place else ""
        call = record.position_of(last, called={})
        detail = f"the last that it called is {describe_call(call)}{place}"
    return ProcessFacts(
        rank=dump.rank, host=host, state="running", detail=detail, source="its dump"
    )


def _time_of(
    dumps: Mapping[int, RankDump], blocked: Mapping[int, BlockedRecord]
) -> float:
    """Return when the last dump was written, as far as that is known."""
    last = max(dump.last_created for dump in dumps.values())
    return max([last, *(dumps[rank].written for rank in blocked)])


def _doubtful(
    verdict: Verdict, unknown: frozenset[int], old: set[int], *, is_known: bool
) -> Verdict:
    """Return a verdict that says what the dumps do not show."""
    unread = sorted(unknown & set(verdict.group_ranks))
    evidence = [*verdict.evidence]
    if outdated := sorted(old & set(unread)):
        evidence.append(f"the dump of {ranks_text(outdated)} is older than this wait")
    if absent := sorted(set(unread) - old):
        evidence.append(f"no dump of {ranks_text(absent)} was read")
    verdict = replace(verdict, evidence=tuple(evidence))
    if verdict.cause != "all_entered" or (is_known and not unread):
        return verdict
    there = sorted(set(verdict.group_ranks) - set(unread))
    known = f"{ranks_text(there)} had called it"
    if unread:
        known += f"; of {ranks_text(unread)} that is not known"
    else:
        known += "; these dumps do not say whether the group has more ranks"
    return replace(verdict, cause="unknown", known=known, remedy=_INCOMPLETE)


def positions(dumps: Mapping[int, RankDump]) -> list[DumpedPosition]:
    """Return where the ranks are in each group, pending calls first."""
    found: dict[tuple[str, str, bool, str], DumpedPosition] = {}
    for rank, dump in sorted(dumps.items()):
        for name, record in dump.records.items():
            entry = record.pending or next(reversed(record.recent), None)
            if entry is None:
                continue
            description = dump.description(name)
            group = f"{name} ({description})" if description else name
            call = describe_call(record.position_of(entry, called={}))
            key = group, call, not entry.retired, entry.place
            known = found.setdefault(
                key, DumpedPosition(*key, ranks=[], since=entry.created)
            )
            known.ranks.append(rank)
            known.since = min(known.since, entry.created)
    return sorted(
        found.values(), key=lambda one: (not one.is_pending, one.since, one.ranks)
    )
