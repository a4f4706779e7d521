"""The verdict on a hung job: whom it waits for, why, and how that is known.

`judge` finds it from what the blocked ranks published. These are pure functions:
reading and asking is `inquiry`'s. A rank is named only if the evidence leaves no other:
it should write a key that does not exist, or it is the only one that can. Otherwise the
verdict is ``unknown``, with what is known.

Several ranks may be awaited for several causes. Each has a cause, evidence and a remedy
of its own. The cause of the verdict is that of its head: the awaited rank without which
the others cannot go on whatever becomes of the rest, the worst first (`CAUSES`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges
from tracedstore.common.causes import (
    BLOCKED_IN_KERNEL,
    CAUSES,
    NO_ANSWER_YET,
    REMEDIES,
    Cause,
    worst,
)
from tracedstore.common.codec import (
    LATER,
    Large,
    Pid,
    Printable,
    Rank,
    Ranks,
    Seconds,
    UpTo,
    Words,
)
from tracedstore.common.procfs import EXITED_WELL, IN_KERNEL
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.observe.blocked_record import CONNECTS, BlockedRecord
from tracedstore.local.facts import ProcessFacts

# Ranks that are named one by one in a text; the others are counted.
_MAX_AWAITED_IN_TEXT = 8
MAX_AWAITED: Final = 64
_MAX_EVIDENCE = 16
_MAX_VERDICT_BYTES = 256 * 1024
# Ranks that have work left and cannot do it: naming them needs no further reason.
_HELD_UP: Final[tuple[Cause, ...]] = ("host_silent", "not_started", "stopped")
_MAX_CYCLE_SHOWN = 8
# Ranks with so many causes or remedies are listed with each of them.
_SEVERAL: Final = 2
# Why a rank is awaited, where the writer of a key is known.
WRITES_KEY: Final = "each awaited rank writes a key that does not exist"
# Seconds within which a process ends whose call has failed, or repeats the call.
_ENDING = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedRank:
    """A rank that the job waits for.

    Attributes:
        rank: The global rank; of an agent, its group rank.
        host: Its host, "" if it is unknown.
        pid: Its process id, None if it is unknown.
        cause: Why it does not arrive.
        doing: What it does instead, for people: ``alive``, ``its process has ended``.
        idle_since: When its last Store call ended, in seconds since the epoch, by the
            clock of the process that asked; None if it is in one, or that is unknown.
            On a silent host, when the last heartbeat of its agent was.
        place: Where its main thread is: ``data.py:88 load_dataset``.
        source: Where this is from: ``itself``, ``its agent``; "" if it is from nobody.
        remedy: What to do about it; "" for what its cause always asks for.
    """

    rank: Rank
    host: Words = ""
    pid: Pid | None = None
    cause: Cause = "unknown"
    doing: Words = ""
    idle_since: Seconds | None = None
    place: Annotated[Words, LATER] = ""
    source: Annotated[Words, LATER] = ""
    remedy: Annotated[Words, LATER] = ""

    @property
    def action(self) -> str:
        """What to do about it."""
        return self.remedy or REMEDIES[self.cause]

    def activity(self, now: float) -> str:
        """Return ``alive, no store call for 612 s, in data.py:88 load_dataset``.

        Args:
            now: The time as of which the durations are, in seconds since the epoch.
        """
        parts = [self.doing] if self.doing else []
        if self.idle_since is not None:
            what = "no store call"
            if self.cause == "host_silent":
                what = "its agent has been silent"
            parts.append(f"{what} for {max(0.0, now - self.idle_since):.0f} s")
        if self.place:
            parts.append(f"in {self.place}")
        return ", ".join(parts)

    def describe(self, now: float, noun: str = "rank") -> str:
        """Return ``rank 2 on node4 (pid 812): alive, ...``."""
        host = f" on {self.host}" if self.host else ""
        pid = "" if self.pid is None else f" (pid {self.pid})"
        activity = self.activity(now)
        doing = f": {activity}" if activity else ""
        return f"{noun} {self.rank}{host}{pid}{doing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whom a stalled job waits for.

    Attributes:
        phase: What the waiting ranks execute: ``init_process_group``, ``new_group 1``,
            ``key epoch/3/go``.
        cause: Why the head of the awaited ranks does not arrive; see above.
        awaited: The first 64 awaited ranks; empty if they are unknown.
        awaited_ranks: All awaited ranks.
        known: What is known where no rank is named.
        waiting_ranks: The ranks that wait.
        key: A key that one of them waits for.
        waited_seconds: How long the longest of these waits has lasted.
        evidence: How this is known, in short sentences.
        remedy: What to do.
        agents: The ranks are those of torchrun's agents.
        time: When it was found, in seconds since the epoch.
        group: The process group in whose collective the ranks wait; "" without one.
        group_ranks: The ranks of that group.
        sequence: The number of the collective in the group; None without one.
        collective: What it is: ``all_reduce``.
        sizes: The size of its tensor; "" if the ranks have none in common.
    """

    phase: Printable
    cause: Cause
    awaited: Annotated[tuple[AwaitedRank, ...], UpTo(MAX_AWAITED)] = ()
    awaited_ranks: Ranks = ()
    known: Words = ""
    waiting_ranks: Ranks = ()
    key: Words = ""
    waited_seconds: Seconds = 0.0
    evidence: Annotated[tuple[Words, ...], UpTo(_MAX_EVIDENCE)] = ()
    remedy: Words = ""
    agents: bool = False
    time: Seconds = 0.0
    group: Annotated[Words, LATER] = ""
    group_ranks: Annotated[Ranks, LATER] = ()
    sequence: Large | None = None
    collective: Annotated[Words, LATER] = ""
    sizes: Annotated[Words, LATER] = ""

    def describe_awaited(self, now: float | None = None) -> str:
        """Describe the awaited ranks in one line; what is known without any.

        Args:
            now: The time as of which the durations are; now by default.
        """
        if not self.awaited_ranks:
            return self.known or "the awaited ranks are unknown"
        noun = "agent" if self.agents else "rank"
        now = time.time() if now is None else now
        described = list(_describe_by_host(self.awaited, now, noun))
        shown = described[:_MAX_AWAITED_IN_TEXT]
        texts = [text for text, _ in shown]
        named = {rank for _, ranks in shown for rank in ranks}
        if rest := [rank for rank in self.awaited_ranks if rank not in named]:
            texts.append(f"and {ranges.ranks_text(rest, noun)}")
        return "; ".join(texts)

    def describe(self, now: float | None = None) -> str:
        """Describe the verdict in one line: for notes, status and report."""
        text = f"waiting in {self.phase} for {self.describe_awaited(now)}"
        if not self.awaited_ranks:
            text = f"waiting in {self.phase}: {self.describe_awaited(now)}"
        if self.evidence:
            text += f" [{self.describe_cause()}: {'; '.join(self.evidence)}]"
        return f"{text}; {self.remedy}" if self.remedy else text

    def describe_cause(self) -> str:
        """Return ``gone``, or ``gone (rank 3), busy (ranks 0-1)`` for several."""
        by_cause: dict[Cause, list[int]] = {}
        for one in worst_first(self.awaited):
            by_cause.setdefault(one.cause, []).append(one.rank)
        if len(by_cause) < _SEVERAL or self.cause not in by_cause:
            return self.cause
        noun = "agent" if self.agents else "rank"
        return ", ".join(
            f"{cause} ({ranges.ranks_text(ranks, noun)})"
            for cause, ranks in by_cause.items()
        )

    def event_fields(self, now: float | None = None) -> dict[str, Any]:
        """Return the fields of `job.stalled` and `job.resumed`.

        Args:
            now: As of `describe_awaited`.
        """
        return {
            "awaited": self.describe_awaited(now),
            "awaited_ranks": list(self.awaited_ranks),
            "awaited_causes": [one.cause for one in self.awaited],
            "cause": self.cause,
            "phase": self.phase,
            "waiting_ranks": ranges.fold(self.waiting_ranks),
            "waiting_count": len(self.waiting_ranks),
            "key": self.key,
            "waited_seconds": round(self.waited_seconds, 3),
            "evidence": list(self.evidence),
            "remedy": self.remedy,
            **self._call_fields(),
        }

    def _call_fields(self) -> dict[str, Any]:
        """Return the fields of a wait in a collective; none for a wait in the store."""
        if not self.group:
            return {}
        return {
            "group": self.group,
            "group_ranks": ranges.fold(self.group_ranks),
            "sequence": self.sequence,
            "collective": self.collective,
            "sizes": self.sizes,
        }

    def to_bytes(self) -> bytes:
        """Encode the verdict for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "Verdict | None":
        """Decode a verdict; None if the value is malformed or too large.

        So it is if it has a rank that the job has not.
        """
        return codec.decode(cls, value, _MAX_VERDICT_BYTES, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """The ranks that are not blocked themselves and that blocked ranks may wait for.

    Attributes:
        writers: Ranks that should have written a key that a blocked rank waits for.
        candidates: Ranks of which at least one should have, where the writer of a key
            is unknown.
        failed: Ranks that would be among these if they had not published a wait: their
            own calls have failed since.
    """

    writers: frozenset[int]
    candidates: frozenset[int]
    failed: frozenset[int] = frozenset()

    @property
    def ranks(self) -> list[int]:
        """The ranks whose processes are of interest, in order."""
        return sorted(self.writers or self.candidates)

    @property
    def all_ranks(self) -> list[int]:
        """All of these ranks, writers first: a candidate may prove to be a writer."""
        return [*sorted(self.writers), *sorted(self.candidates - self.writers)]


def still_waits(record: BlockedRecord, answer: ProcessFacts | None, now: float) -> bool:
    """Return whether what a rank waits for counts, by what is known of its process.

    It counts too if the process has ended because its call failed: the rank is not
    why the others wait. One that outlives the failure does something else, and may be
    the one that is awaited.

    Args:
        record: What the rank has published.
        answer: What is known of its process.
        now: The time, in seconds since the epoch.
    """
    if record.failed is None:
        # The record of a process that has ended, or whose host is silent, stays.
        return answer is None or answer.state not in ("gone", "silent")
    alive = answer is not None and answer.state not in ("gone", "silent")
    return not alive or now - record.failed < _ENDING


def find_suspects(blocked: Mapping[int, BlockedRecord], world_size: int) -> Suspects:
    """Return the ranks that the blocked ones wait for and that are not blocked.

    A blocked rank that others wait for is not a suspect: it waits itself, and what it
    waits for counts.
    """
    writers: set[int] = set()
    candidates: set[int] = set()
    # Those that ranks still wait for.
    awaited: set[int] = set()
    for record in blocked.values():
        if record.awaits is not None:
            ranks = set(record.awaits)
            writers |= ranks
        else:
            ranks = set(_members(record, world_size))
            candidates |= ranks
        if record.failed is None:
            awaited |= ranks
    return Suspects(
        writers=frozenset(writers.difference(blocked)),
        candidates=frozenset(candidates.difference(blocked)),
        failed=frozenset(
            rank
            for rank in awaited & blocked.keys()
            if blocked[rank].failed is not None
        ),
    )


def judge(
    blocked: Mapping[int, BlockedRecord],
    suspects: Suspects,
    world_size: int,
    answers: Mapping[int, ProcessFacts],
    registered: Mapping[int, RankInfo],
    host_of: Callable[[int], str],
    now: float,
) -> Verdict:
    """Judge whom the blocked ranks wait for.

    Args:
        blocked: The records of the blocked ranks; at least one.
        suspects: What `find_suspects` returned for them.
        world_size: The number of ranks.
        answers: What is known about the processes of the suspects.
        registered: The registrations of the suspects, of this attempt.
        host_of: Returns the host on which a rank should run, "" if it is unknown.
        now: The time, in seconds since the epoch.
    """
    waiting = describe_waiting(blocked, now)
    named = sorted(suspects.writers)
    evidence: tuple[str, ...] = (WRITES_KEY,)
    found = {
        rank: describe_rank(
            rank, answers.get(rank), registered.get(rank), host_of(rank), now
        )
        for rank in suspects.ranks
    }
    # A process of a silent host that answers refutes that the host is.
    answering = {one.host for one in answers.values() if one.state != "silent"}
    for rank, one in found.items():
        if one.cause == "host_silent" and one.host in answering:
            doing = "registered, but no process answers for it"
            found[rank] = replace(one, cause="unknown", doing=doing, idle_since=None)
    if not named and suspects.candidates:
        named = _eliminate(found, answers)
        if not named:
            return _ambiguous(waiting, found)
        evidence = _why_not(found, named, now)
    if named:
        awaited = tuple(found[rank] for rank in named[:MAX_AWAITED])
        return replace(
            waiting,
            cause=worst(one.cause for one in awaited),
            awaited=awaited,
            awaited_ranks=tuple(named),
            evidence=(*evidence, *sources_of(awaited)),
            remedy=remedy_of(awaited),
        )
    return _judge_cycle(waiting, blocked, world_size)


def describe_rank(
    rank: int, answer: ProcessFacts | None, info: RankInfo | None, host: str, now: float
) -> AwaitedRank:
    """Return what is known about a rank that does not arrive.

    Args:
        rank: The rank.
        answer: What is known about its process.
        info: Its registration.
        host: The host on which it should run, "" if it is unknown.
        now: When its process was asked, in seconds since the epoch.
    """
    if answer is not None:
        awaited = AwaitedRank(
            rank=rank, host=answer.host, pid=answer.pid, source=answer.source
        )
    elif info is not None:
        awaited = AwaitedRank(rank=rank, host=info.host, pid=info.pid)
    else:
        return AwaitedRank(
            rank=rank,
            host=host,
            cause="not_started",
            doing="never registered in this store",
        )
    if answer is None:
        doing = "registered, but no process of its host answers"
        return replace(awaited, doing=doing)
    if answer.state == "running":
        arrived = answer.registered or info is not None
        return _alive(awaited, answer, now, arrived=arrived)
    return _not_running(awaited, answer, now)


def _not_running(awaited: AwaitedRank, answer: ProcessFacts, now: float) -> AwaitedRank:
    """Return what is known about a rank whose process has not answered itself."""
    if answer.state == "silent":
        since = None if answer.idle_seconds is None else now - answer.idle_seconds
        doing = f"no process of {awaited.host} answers"
        return replace(awaited, cause="host_silent", doing=doing, idle_since=since)
    if answer.state == "gone":
        doing = f"its process has ended{_detail(answer)}"
        return replace(awaited, cause="gone", doing=doing)
    if answer.state == "stopped":
        doing = f"alive, but does not answer{_detail(answer)}"
        remedy = BLOCKED_IN_KERNEL if answer.detail == IN_KERNEL else ""
        return replace(awaited, cause="stopped", doing=doing, remedy=remedy)
    if answer.pid is None:
        return replace(awaited, doing=answer.detail)  # no process of it is known
    # It may be slow, hold the GIL, or be on a machine with too little CPU time.
    doing = f"alive, {answer.detail}" if answer.detail else "alive"
    return replace(awaited, doing=doing, remedy=NO_ANSWER_YET)


def _alive(
    awaited: AwaitedRank, answer: ProcessFacts, now: float, *, arrived: bool
) -> AwaitedRank:
    """Return what a rank does whose process runs.

    Args:
        awaited: The rank.
        answer: What its process does.
        now: When it was asked, in seconds since the epoch.
        arrived: It has registered in the store.
    """
    place = answer.place or (str(answer.frames[0]) if answer.frames else "")
    if not arrived:
        doing = "alive, but has not connected to this store"
        return replace(awaited, cause="late", doing=doing, place=place)
    idle_since = None
    if answer.idle_seconds is not None and not answer.operation:
        idle_since = max(0.0, now - answer.idle_seconds)
    doing = f"alive, in {answer.operation}" if answer.operation else "alive"
    if answer.detail:
        doing += f", {answer.detail}"
    return replace(
        awaited, cause="busy", doing=doing, idle_since=idle_since, place=place
    )


def describe_answer(rank: int, answer: ProcessFacts, info: RankInfo | None) -> str:
    """Describe a rank whose process has just been asked."""
    now = time.time()
    return describe_rank(rank, answer, info, "", now).describe(now)


def _describe_by_host(
    awaited: Iterable[AwaitedRank], now: float, noun: str
) -> Iterator[tuple[str, list[int]]]:
    """Yield the text on each rank, worst first; one for all ranks of a silent host."""
    by_host: dict[str, list[AwaitedRank]] = {}
    for one in worst_first(awaited):
        if one.cause == "host_silent":
            by_host.setdefault(one.host, []).append(one)
    for one in worst_first(awaited):
        if one.cause != "host_silent":
            yield one.describe(now, noun), [one.rank]
        elif found := by_host.pop(one.host, []):
            ranks = [each.rank for each in found]
            where = f"{ranges.ranks_text(ranks, noun)} on {one.host}"
            what = f"{one.activity(now)}: the host is down, frozen or cut off"
            yield f"{where}: {what}", ranks


def worst_first(awaited: Iterable[AwaitedRank]) -> list[AwaitedRank]:
    """Return ranks in the order in which they are described."""
    return sorted(awaited, key=lambda one: (CAUSES.index(one.cause), one.rank))


def remedy_of(awaited: Iterable[AwaitedRank]) -> str:
    """Return what to do, with the ranks if it is not the same for all of them."""
    by_action: dict[str, list[int]] = {}
    for one in worst_first(awaited):
        by_action.setdefault(one.action, []).append(one.rank)
    if len(by_action) < _SEVERAL:
        return next(iter(by_action), REMEDIES["unknown"])
    return "; ".join(
        f"{ranges.ranks_text(ranks)}: {action}" for action, ranks in by_action.items()
    )


def _members(record: BlockedRecord, world_size: int) -> Iterable[int]:
    return range(world_size) if record.members is None else record.members


def describe_waiting(blocked: Mapping[int, BlockedRecord], now: float) -> Verdict:
    """Return a verdict with the waiting side only."""
    phases = Counter(record.phase for record in blocked.values())
    phase, _ = phases.most_common(1)[0]
    oldest = min(blocked.values(), key=lambda record: record.started)
    in_phase = [record for record in blocked.values() if record.phase == phase]
    example = min(in_phase, key=lambda record: (record.started, record.rank))
    return Verdict(
        phase=phase,
        cause="unknown",
        waiting_ranks=tuple(sorted(blocked)),
        key=example.keys[0] if example.keys else "",
        waited_seconds=max(0.0, now - oldest.started),
        time=now,
    )


def _eliminate(
    found: Mapping[int, AwaitedRank], answers: Mapping[int, ProcessFacts]
) -> list[int]:
    """Return the candidates that must be awaited; none if others may be.

    A process that has ended may have done its work before, whatever its exit code. It
    is named only where no candidate is left that could still write the key.
    """
    if len(found) == 1:
        return list(found)
    held_up = [rank for rank, one in found.items() if one.cause in _HELD_UP]
    ended = [rank for rank, one in found.items() if one.cause == "gone"]
    if len(held_up) + len(ended) < len(found):
        return sorted(held_up)
    unfinished = [
        rank
        for rank in ended
        if rank not in answers or answers[rank].detail != EXITED_WELL
    ]
    return sorted([*held_up, *unfinished])


def _why_not(
    found: Mapping[int, AwaitedRank], named: Iterable[int], now: float
) -> tuple[str, ...]:
    """Return why no other rank is named than these, with the candidates left."""
    rest = found.keys() - set(named)
    if not rest:
        return ("all other ranks are blocked",)
    return (
        "the other ranks are blocked, alive, or have ended",
        *_describe_each([found[rank] for rank in rest], now),
    )


def _describe_each(candidates: Iterable[AwaitedRank], now: float) -> list[str]:
    """Describe candidates, one in each text; all of them, at the end by number."""
    described = worst_first(candidates)
    shown = [one.describe(now) for one in described[:_MAX_CYCLE_SHOWN]]
    if rest := [one.rank for one in described[_MAX_CYCLE_SHOWN:]]:
        shown.append(ranges.ranks_text(rest))
    return [f"not blocked: {text}" for text in shown]


def _ambiguous(waiting: Verdict, found: Mapping[int, AwaitedRank]) -> Verdict:
    return replace(
        waiting,
        known=f"one or more of {ranges.ranks_text(found)}, not blocked;"
        " the writer of the key is unknown",
        evidence=tuple(_describe_each(found.values(), waiting.time)),
        remedy=REMEDIES["unknown"],
    )


def _judge_cycle(
    waiting: Verdict, blocked: Mapping[int, BlockedRecord], world_size: int
) -> Verdict:
    """Judge a stall in which all ranks that could act are blocked themselves."""
    if all(record.operation == CONNECTS for record in blocked.values()):
        return replace(
            waiting,
            known="its ranks are connecting to each other",
            evidence=tuple(_wait_texts(blocked, sorted(blocked))),
            remedy=REMEDIES["unknown"],
        )
    cycle = find_cycle(blocked, world_size)
    if not cycle:
        return replace(
            waiting,
            known="all ranks that could write the keys are blocked themselves",
            evidence=tuple(_wait_texts(blocked, sorted(blocked))),
            remedy=REMEDIES["unknown"],
        )
    protocols = {blocked[rank].protocol for rank in cycle}
    # Ranks in other groups may wait because of these.
    disputed = {blocked[rank].group for rank in cycle}
    in_question = [rank for rank in sorted(blocked) if blocked[rank].group in disputed]
    groups = Counter(blocked[rank].group for rank in in_question)
    same_protocol = len(protocols) == 1 and protocols != {""}
    if same_protocol and len(disputed) > 1:
        # The ranks that most others do not follow are the odd ones.
        most = max(groups.values())
        odd = [rank for rank in in_question if groups[blocked[rank].group] < most]
        named = odd or cycle
        return name_blocked(waiting, blocked, named, "diverged")
    return name_blocked(waiting, blocked, cycle, "circular")


def name_blocked(
    waiting: Verdict,
    blocked: Mapping[int, BlockedRecord],
    named: list[int],
    cause: Cause,
) -> Verdict:
    """Return a verdict that names blocked ranks, with what they wait for."""
    awaited = tuple(
        AwaitedRank(
            rank=rank,
            host=blocked[rank].host,
            pid=blocked[rank].pid,
            cause=cause,
            doing=describe_wait(blocked[rank]),
        )
        for rank in named[:MAX_AWAITED]
    )
    others = [rank for rank in sorted(blocked) if rank not in named]
    return replace(
        waiting,
        cause=cause,
        awaited=awaited,
        awaited_ranks=tuple(named),
        evidence=tuple(_wait_texts(blocked, others or named)),
        remedy=REMEDIES[cause],
    )


def find_cycle(blocked: Mapping[int, BlockedRecord], world_size: int) -> list[int]:
    """Return ranks that wait for each other in a circle, [] if there are none."""
    seen: set[int] = set()
    for start in sorted(blocked):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = _next_blocked(blocked, rank, world_size)
        if rank is not None and rank in path:
            return sorted(path[path.index(rank) :])
    return []


def _next_blocked(
    blocked: Mapping[int, BlockedRecord], rank: int, world_size: int
) -> int | None:
    """Return a blocked rank that a rank waits for; None if its writer is unknown."""
    record = blocked[rank]
    awaits = record.awaits
    if awaits is None:
        # With two ranks only the other one can write the key.
        awaits = tuple(other for other in _members(record, world_size) if other != rank)
        if len(awaits) != 1:
            return None
    return next((other for other in awaits if other in blocked), None)


def _wait_texts(
    blocked: Mapping[int, BlockedRecord], ranks: Iterable[int]
) -> list[str]:
    """Return what ranks wait for, those that wait for the same in one text."""
    by_wait: dict[str, list[int]] = {}
    for rank in ranks:
        by_wait.setdefault(describe_wait(blocked[rank]), []).append(rank)
    return [
        f"{ranges.ranks_text(some)}: {text}"
        for text, some in list(by_wait.items())[:_MAX_CYCLE_SHOWN]
    ]


def describe_wait(record: BlockedRecord) -> str:
    """Describe what a blocked rank waits for, or waited for."""
    key = f", key {record.keys[0]}" if record.keys else ""
    awaits = f", for {ranges.ranks_text(record.awaits)}" if record.awaits else ""
    if record.collective is not None and record.collective.place:
        key = f" at {record.collective.place}"
    phase_has_key = record.keys and record.phase == f"key {record.keys[0]}"
    what = f"in {record.phase}{'' if phase_has_key else key}{awaits}"
    if record.failed is None:
        return f"waits {what}"
    return f"waited {what}, until its call failed"


def sources_of(awaited: Iterable[AwaitedRank]) -> list[str]:
    """Return the sources of what is known about ranks."""
    by_source: dict[str, list[int]] = {}
    for one in awaited:
        if one.source:
            by_source.setdefault(one.source, []).append(one.rank)
    return [
        f"state of {ranges.ranks_text(ranks)} from {source}"
        for source, ranks in by_source.items()
    ]


def _detail(answer: ProcessFacts) -> str:
    return f": {answer.detail}" if answer.detail else ""
