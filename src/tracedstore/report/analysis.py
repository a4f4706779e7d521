"""Rounds to what an operator asks: who was missing, who is late, what failed first."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tracedstore.coordination.ranges import unfold
from tracedstore.report import formatting
from tracedstore.report.barriers import Report, Round, rounds_of
from tracedstore.report.records import COMPLETED, Facts, Failure, Process, Said
from tracedstore.report.values import NOBODY

# Seconds; below, a difference is how long the store took to let a rank go.
CLOCK_AGREES: Final = 0.05
# Seconds by which a look has to be later than another one to know better.
_CLOCKS_DIFFER = 1.0
# Rounds that a clock has to be seen in before it is judged.
_FEWEST_ROUNDS = 3


@dataclass(slots=True)
class Straggler:
    """A rank, and how late it is.

    Attributes:
        rank: Which.
        last: Barriers that it came to as the last one.
        missing: Barriers that it was said to be missing at.
        rounds: Completed barriers that it was seen at.
        cost: Seconds by which it was behind half of the ranks, over those where it was
            the last.
        late: The same in the median of all completed barriers; below zero if early.
        worst: The same where it was the most.
        worst_at: There.
    """

    rank: int
    last: int = 0
    missing: int = 0
    rounds: int = 0
    cost: float = 0.0
    late: float = 0.0
    worst: float = 0.0
    worst_at: str = ""


@dataclass(slots=True)
class Opinion:
    """What some ranks said of an incident, all of them the same.

    Attributes:
        said: Of its end.
        warned: Before, where that names nobody.
        reports: Who said it, and when.
    """

    said: Said
    warned: Said
    reports: list[Report] = field(default_factory=list)


@dataclass(slots=True)
class Incident:
    """A barrier that did not complete, or not in time.

    Attributes:
        round: Which.
        opinions: What was said, by how many said it.
        missing: Ranks that somebody missed and that did not come.
        came: Ranks that somebody missed and that came after all.
        looked: When somebody last looked who is missing; 0 if nobody could.
    """

    round: Round
    opinions: list[Opinion]
    missing: list[int]
    came: list[int]
    looked: float


@dataclass(slots=True)
class Analysis:
    """All of it.

    Attributes:
        facts: What it is about.
        rounds: Every barrier, in order of their ends.
        incidents: Those that went wrong: those that did not complete first, and of
            these those last that may have.
        stragglers: Ranks that were last or missing, the worst first.
        failures: What failed first in each process, in order of time.
        clocks: By how many seconds a host's clock is ahead of most.
    """

    facts: Facts
    rounds: list[Round]
    incidents: list[Incident]
    stragglers: list[Straggler]
    failures: list[tuple[Process, Failure]]
    clocks: dict[str, float]

    @property
    def ranks(self) -> list[int]:
        """Every rank that was heard of itself."""
        return sorted(self.facts.heard)

    @property
    def jobs(self) -> list[str]:
        """Every job that is known by its name."""
        return sorted({run_id for run_id, _ in self.facts.barriers if run_id})

    def when(self, moment: float) -> str:
        """Write a time in UTC, with the day where the logs are of more than one."""
        days = {
            formatting.moment(each)[:10] for each in (self.facts.first, self.facts.last)
        }
        return formatting.moment(moment)[11 if len(days) == 1 else 0 :]

    def clock_off(self, host: str) -> float:
        """Tell how far a host's clock is ahead; 0 if it agrees, or is not known."""
        ahead = self.clocks.get(host, 0.0)
        return ahead if abs(ahead) > CLOCK_AGREES else 0.0


def analysed(facts: Facts) -> Analysis:
    """Answer everything."""
    rounds = rounds_of(facts)
    incidents = [_incident(each) for each in rounds if each.reports]
    incidents.sort(
        key=lambda each: (each.round.completed, each.round.went_on, each.round.start)
    )
    failures = sorted(
        facts.first_failures.items(), key=lambda each: (each[1].when, each[0])
    )
    return Analysis(
        facts=facts,
        rounds=rounds,
        incidents=incidents,
        stragglers=_stragglers(rounds, incidents),
        failures=failures,
        clocks=_clocks(facts, rounds),
    )


def _incident(seen: Round) -> Incident:
    opinions: dict[tuple[Said, Said], Opinion] = {}
    seen_missing: dict[int, float] = {}
    looked, at_last = 0.0, frozenset[int]()
    for report in seen.reports:
        key = report.said, report.warned
        opinions.setdefault(key, Opinion(*key)).reports.append(report)
    for opinion in opinions.values():
        named = frozenset(unfold(opinion.reports[0].missing))
        when = max(report.looked for report in opinion.reports)
        for rank in named:
            seen_missing[rank] = max(when, seen_missing.get(rank, 0.0))
        if named and when > looked:
            looked, at_last = when, named
    # Whom a later look does not find missing has come; a host's clock may be off.
    came = set(seen.ranks) | {
        rank
        for rank, when in seen_missing.items()
        if rank not in at_last and when < looked - _CLOCKS_DIFFER
    }
    done = seen.completed
    return Incident(
        round=seen,
        opinions=sorted(opinions.values(), key=lambda each: -len(each.reports)),
        missing=[] if done else sorted(seen_missing.keys() - came),
        came=sorted(seen_missing.keys() if done else seen_missing.keys() & came),
        looked=looked,
    )


def _stragglers(
    rounds: Sequence[Round], incidents: Sequence[Incident]
) -> list[Straggler]:
    found: dict[int, Straggler] = {}
    behind: dict[int, array[float]] = defaultdict(lambda: array("f"))
    for each in rounds:
        if each.kind == COMPLETED:
            _judge(each, found, behind)
    for incident in incidents:
        for rank in incident.missing:
            found.setdefault(rank, Straggler(rank)).missing += 1
    for rank, straggler in found.items():
        if seen := behind.get(rank):
            straggler.rounds, straggler.late = len(seen), median(seen)
    return sorted(
        (each for each in found.values() if each.last or each.missing),
        key=lambda each: (-each.missing, -each.cost, -each.last, each.rank),
    )


def _judge(
    seen: Round, found: dict[int, Straggler], behind: dict[int, "array[float]"]
) -> None:
    if seen.last != NOBODY:
        found.setdefault(seen.last, Straggler(seen.last)).last += 1
    middle = seen.middle
    for rank, late in zip(seen.ranks, seen.late, strict=True):
        by = late - middle
        behind[rank].append(by)
        if by > 0:
            straggler = found.setdefault(rank, Straggler(rank))
            if rank == seen.last:
                straggler.cost += by
            if by > straggler.worst:
                straggler.worst, straggler.worst_at = by, seen.barrier.prefix


def _clocks(facts: Facts, rounds: Sequence[Round]) -> dict[str, float]:
    """Compare clocks by when ranks were let go, which is the same moment for all."""
    ahead: dict[str, array[float]] = defaultdict(lambda: array("f"))
    for each in rounds:
        if each.kind == COMPLETED and not each.reports:
            for rank, end in zip(each.ranks, each.ends, strict=True):
                ahead[facts.host(rank)].append(end - each.end)
    return {
        host: median(differences)
        for host, differences in sorted(ahead.items())
        if host and len(differences) >= _FEWEST_ROUNDS
    }


def outcomes(rounds: Sequence[Round]) -> Counter[int]:
    """Count barriers by how they ended; those that only seem to have are not here."""
    return Counter(each.kind for each in rounds if not each.seems_completed)
