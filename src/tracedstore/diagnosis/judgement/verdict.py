"""The verdict on a hung job: whom it waits for, why, and how that is known.

`judge` finds it from what the blocked ranks published. These are pure functions:
reading and asking is `inquiry`'s. A rank is named only if the evidence leaves no other:
it should write a key that does not exist, or it is the only one that can. Otherwise the
verdict is ``unknown``, with what is known.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges
from tracedstore.common.causes import REMEDIES, Cause, worst
from tracedstore.common.codec import Pid, Printable, Rank, Ranks, Seconds, UpTo, Words
from tracedstore.common.procfs import EXITED_WELL
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.local.facts import NO_ANSWER, ProcessFacts

# Ranks that are named one by one in a text; the others are counted.
_MAX_AWAITED_IN_TEXT = 8
MAX_AWAITED: Final = 64
_MAX_EVIDENCE = 16
_MAX_VERDICT_BYTES = 256 * 1024
# Processes that cannot be waiting for anything: naming them needs no further reason.
_CANNOT_ARRIVE: tuple[Cause, ...] = ("not_started", "gone", "stopped")
_MAX_CYCLE_SHOWN = 8
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
        doing: What it does instead, for people: ``alive, no store call for 612 s, in
            data.py:88 load_dataset``.
    """

    rank: Rank
    host: Words = ""
    pid: Pid | None = None
    cause: Cause = "unknown"
    doing: Words = ""

    def describe(self, noun: str = "rank") -> str:
        """Return ``rank 2 on node4 (pid 812): alive, ...``."""
        host = f" on {self.host}" if self.host else ""
        pid = "" if self.pid is None else f" (pid {self.pid})"
        doing = f": {self.doing}" if self.doing else ""
        return f"{noun} {self.rank}{host}{pid}{doing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whom a stalled job waits for.

    Attributes:
        phase: What the waiting ranks execute: ``init_process_group``, ``new_group 1``,
            ``key epoch/3/go``.
        cause: Why the awaited ranks do not arrive; of several causes the first one in
            the order of `CAUSES`.
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

    def describe_awaited(self) -> str:
        """Describe the awaited ranks in one line; what is known without any."""
        if not self.awaited_ranks:
            return self.known or "the awaited ranks are unknown"
        noun = "agent" if self.agents else "rank"
        shown = self.awaited[:_MAX_AWAITED_IN_TEXT]
        texts = [awaited.describe(noun) for awaited in shown]
        named = {awaited.rank for awaited in shown}
        if rest := [rank for rank in self.awaited_ranks if rank not in named]:
            texts.append(f"and {ranges.ranks_text(rest, noun)}")
        return "; ".join(texts)

    def describe(self) -> str:
        """Describe the verdict in one line: for notes, status and report."""
        text = f"waiting in {self.phase} for {self.describe_awaited()}"
        if not self.awaited_ranks:
            text = f"waiting in {self.phase}: {self.describe_awaited()}"
        if self.evidence:
            text += f" [{self.cause}: {'; '.join(self.evidence)}]"
        return f"{text}; {self.remedy}" if self.remedy else text

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of `job.stalled` and `job.resumed`."""
        return {
            "awaited": self.describe_awaited(),
            "awaited_ranks": list(self.awaited_ranks),
            "cause": self.cause,
            "phase": self.phase,
            "waiting_ranks": ranges.fold(self.waiting_ranks),
            "waiting_count": len(self.waiting_ranks),
            "key": self.key,
            "waited_seconds": round(self.waited_seconds, 3),
            "evidence": list(self.evidence),
            "remedy": self.remedy,
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
        return answer is None or answer.state != "gone"
    alive = answer is not None and answer.state in ("running", "stopped")
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
    waiting = _describe_waiting(blocked, now)
    named = sorted(suspects.writers)
    why = "each awaited rank writes a key that does not exist"
    found = {
        rank: describe_rank(
            rank, answers.get(rank), registered.get(rank), host_of(rank)
        )
        for rank in suspects.ranks
    }
    if not named and suspects.candidates:
        named, why = _eliminate(suspects.candidates, found, answers)
        if not named:
            return _ambiguous(waiting, suspects.candidates, found)
    if named:
        awaited = tuple(found[rank] for rank in named[:MAX_AWAITED])
        cause = worst(one.cause for one in awaited)
        # They have not connected, but the launcher started them.
        alive = cause == "not_started" and answers.keys() >= set(named)
        return replace(
            waiting,
            cause=cause,
            awaited=awaited,
            awaited_ranks=tuple(named),
            evidence=(why, *_evidence(answers, named)),
            remedy=REMEDIES["busy" if alive else cause],
        )
    return _judge_cycle(waiting, blocked, world_size)


def describe_rank(
    rank: int, answer: ProcessFacts | None, info: RankInfo | None, host: str
) -> AwaitedRank:
    """Return what is known about a rank that does not arrive."""
    if answer is not None:
        awaited = AwaitedRank(rank=rank, host=answer.host, pid=answer.pid)
    elif info is not None:
        awaited = AwaitedRank(rank=rank, host=info.host, pid=info.pid)
    else:
        return AwaitedRank(
            rank=rank,
            host=host,
            cause="not_started",
            doing="never registered in this store",
        )
    if answer is None or answer.state == "silent":
        doing = "registered, but no process of its host answers"
        return replace(awaited, cause="unknown", doing=doing)
    if answer.state == "gone":
        doing = f"its process has ended{_detail(answer)}"
        return replace(awaited, cause="gone", doing=doing)
    if answer.state == "stopped":
        doing = f"alive, but does not answer{_detail(answer)}"
        return replace(awaited, cause="stopped", doing=doing)
    if not (answer.registered or info is not None):
        doing = f"alive, but has not connected to this store{_place(answer)}"
        return replace(awaited, cause="not_started", doing=doing)
    return replace(awaited, cause="busy", doing=_activity(answer))


def _members(record: BlockedRecord, world_size: int) -> Iterable[int]:
    return range(world_size) if record.members is None else record.members


def _describe_waiting(blocked: Mapping[int, BlockedRecord], now: float) -> Verdict:
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
    candidates: frozenset[int],
    found: Mapping[int, AwaitedRank],
    answers: Mapping[int, ProcessFacts],
) -> tuple[list[int], str]:
    """Return the candidates that must be awaited, and why; none if several may be."""
    if len(candidates) == 1:
        return sorted(candidates), "all other ranks are blocked"
    absent = [
        rank
        for rank in sorted(candidates)
        if found[rank].cause in _CANNOT_ARRIVE and not _is_harmless(answers.get(rank))
    ]
    if absent:
        return absent, "the other ranks are blocked, or alive"
    return [], ""


def _is_harmless(answer: ProcessFacts | None) -> bool:
    """Return whether a process may have finished its work, or may be slow.

    Another rank may be the one that should write the key.
    """
    if answer is None:
        return False
    return answer.detail == EXITED_WELL or answer.detail.startswith(NO_ANSWER)


def _ambiguous(
    waiting: Verdict, candidates: frozenset[int], found: Mapping[int, AwaitedRank]
) -> Verdict:
    doing = [found[rank].describe() for rank in sorted(found)[:_MAX_CYCLE_SHOWN]]
    return replace(
        waiting,
        known=f"one or more of {ranges.ranks_text(candidates)}, not blocked;"
        " the writer of the key is unknown",
        evidence=tuple(doing),
        remedy=REMEDIES["unknown"],
    )


def _judge_cycle(
    waiting: Verdict, blocked: Mapping[int, BlockedRecord], world_size: int
) -> Verdict:
    """Judge a stall in which all ranks that could act are blocked themselves."""
    cycle = _find_cycle(blocked, world_size)
    if not cycle:
        return replace(
            waiting,
            known="all ranks that could write the keys are blocked themselves",
            evidence=tuple(_wait_texts(blocked, sorted(blocked))),
            remedy=REMEDIES["unknown"],
        )
    protocols = {blocked[rank].protocol for rank in cycle}
    groups = Counter(record.group for record in blocked.values())
    same_protocol = len(protocols) == 1 and protocols != {""}
    if same_protocol and len({blocked[rank].group for rank in cycle}) > 1:
        # The ranks that most others do not follow are the odd ones.
        most = max(groups.values())
        odd = [rank for rank in sorted(blocked) if groups[blocked[rank].group] < most]
        named = odd or cycle
        return _name_blocked(waiting, blocked, named, "diverged")
    return _name_blocked(waiting, blocked, cycle, "circular")


def _name_blocked(
    waiting: Verdict,
    blocked: Mapping[int, BlockedRecord],
    named: list[int],
    cause: Cause,
) -> Verdict:
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


def _find_cycle(blocked: Mapping[int, BlockedRecord], world_size: int) -> list[int]:
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
    phase_has_key = record.keys and record.phase == f"key {record.keys[0]}"
    what = f"in {record.phase}{'' if phase_has_key else key}{awaits}"
    if record.failed is None:
        return f"waits {what}"
    return f"waited {what}, until its call failed"


def _evidence(answers: Mapping[int, ProcessFacts], named: Iterable[int]) -> list[str]:
    """Return the sources of what is known about the named ranks."""
    by_source: dict[str, list[int]] = {}
    for rank in named:
        answer = answers.get(rank)
        if answer is not None and answer.source:
            by_source.setdefault(answer.source, []).append(rank)
    return [
        f"state of {ranges.ranks_text(ranks)} from {source}"
        for source, ranks in by_source.items()
    ]


def _detail(answer: ProcessFacts) -> str:
    return f": {answer.detail}" if answer.detail else ""


def _place(answer: ProcessFacts) -> str:
    return f", in {answer.frames[0]}" if answer.frames else ""


def _activity(answer: ProcessFacts) -> str:
    parts = ["alive"]
    if answer.operation:
        parts.append(f"in {answer.operation}")
    elif answer.idle_seconds is not None:
        parts.append(f"no store call for {answer.idle_seconds:.0f} s")
    if answer.detail:
        parts.append(answer.detail)
    return ", ".join(parts) + _place(answer)
