"""Judges whom a stalled job waits for, from what its blocked ranks published.

Pure functions: reading and asking is `inquiry`'s. A rank is named only if the evidence
leaves no other: it should write a key that does not exist, or it is the only one that
can. Otherwise the verdict is ``unknown``, with what is known.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tracedstore.common import ranges
from tracedstore.common.causes import REMEDIES, Cause, worst
from tracedstore.common.procfs import EXITED_WELL
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import MAX_AWAITED, AwaitedRank, Verdict
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.local.facts import NO_ANSWER, ProcessFacts

# Processes that cannot be waiting for anything: naming them needs no further reason.
_CANNOT_ARRIVE: tuple[Cause, ...] = ("not_started", "gone", "stopped")
_MAX_CYCLE_SHOWN = 8
# Seconds within which a process ends whose call has failed, or repeats the call.
_ENDING = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """The ranks that are not blocked themselves and that blocked ranks may wait for.

    Attributes:
        writers: Ranks that should have written a key that a blocked rank waits for.
        candidates: Ranks of which at least one should have, where the writer of a key
            is unknown.
    """

    writers: frozenset[int]
    candidates: frozenset[int]

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
    for record in blocked.values():
        if record.awaits is not None:
            writers.update(record.awaits)
        else:
            candidates.update(_members(record, world_size))
    return Suspects(
        writers=frozenset(writers.difference(blocked)),
        candidates=frozenset(candidates.difference(blocked)),
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
