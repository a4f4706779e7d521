"""Visits to rounds: who was at a barrier at the same time.

A job that was restarted comes to the same key prefix again. And one visit may be told
of several times: by the log and by a span, by two copies of a log, and by every
`barrier.waiting` before its end.
"""

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple

from tracedstore.report.records import (
    COMPLETED,
    NOTHING,
    UNSAID,
    WAITING,
    BarrierRecord,
    Facts,
    Said,
)
from tracedstore.report.values import NOBODY

# Seconds by which what is told of the same visit may lie apart: a line is written a
# little after what it tells of. A rank that comes back was restarted in between.
_SAME_VISIT = 0.25


class Visit(NamedTuple):
    """A rank at a barrier."""

    rank: int
    end: float
    waited: float
    kind: int
    last: int
    said: int
    pid: int
    # Of the last warning that is part of it, unless all that is known is a warning.
    warned: int = NOTHING
    warned_at: float = 0.0

    @property
    def arrival(self) -> float:
        """When it came, by its host's clock."""
        return self.end - self.waited

    @property
    def warning(self) -> tuple[int, float]:
        """What it said of it in the last warning, and when."""
        if self.kind == WAITING:
            return self.said, self.end
        return self.warned, self.warned_at


class Report(NamedTuple):
    """What a rank said who did not get through, or not in time.

    Attributes:
        rank: Who.
        pid: Its process; 0 where that is not known.
        when: When it said so.
        waited: How long it had been there.
        kind: How its visit ended.
        said: Of the end, or, where none is known, in its last warning.
        warned: In its last warning, where what it said of the end names nobody.
        looked: When it saw who was missing.
    """

    rank: int
    pid: int
    when: float
    waited: float
    kind: int
    said: Said
    warned: Said
    looked: float

    @property
    def missing(self) -> str:
        """The ranks that it named last, folded."""
        return self.said.missing or self.warned.missing


@dataclass(slots=True, eq=False)
class Round:
    """A barrier, once.

    Attributes:
        barrier: Which.
        world_size: How many ranks it is for.
        kind: COMPLETED if somebody got through and nobody failed; else the worst.
        start: When the first rank came.
        end: When it was over.
        ranks: Who is known to have come.
        late: By how many seconds after the first, in the same order.
        ends: When each was through with it, by its host's clock.
        last: Who came last; NOBODY where that is not known.
        reports: What was said of it.
        by_clock: Arrivals are compared by the hosts' clocks.
        went_on: Its end is not told, but a process that waited at it came to another
            one after the last that was said of it: it was let go, or has more than one
            thread. A completion is told at debug level, which logs seldom have.
        seems_completed: And it was still there when it should have warned of this one
            again, and had not.
    """

    barrier: BarrierRecord
    world_size: int
    kind: int
    start: float
    end: float
    ranks: "array[int]"
    late: "array[float]"
    ends: "array[float]"
    last: int
    reports: list[Report]
    by_clock: bool
    went_on: bool = False
    seems_completed: bool = False

    @property
    def completed(self) -> bool:
        """Whether all came, as it was told, or as far as can be told."""
        return self.kind == COMPLETED or self.seems_completed

    @property
    def spread(self) -> float:
        """Seconds between the first and the last."""
        return max(self.late, default=0.0)

    @property
    def middle(self) -> float:
        """Seconds until half of them were there."""
        return median(self.late) if self.late else 0.0


def rounds_of(facts: Facts) -> list[Round]:
    """Give every round, in order of their ends."""
    visits = facts.visits
    order = sorted(range(len(visits)), key=visits.barrier.__getitem__)
    found: list[Round] = []
    begin = 0
    for place, key in enumerate(facts.barriers):
        after = begin
        while after < len(order) and visits.barrier[order[after]] == place:
            after += 1
        rows = sorted(order[begin:after], key=visits.end.__getitem__)
        begin = after
        found += [
            _round(BarrierRecord(*key), facts.world_sizes[place], told, facts.said)
            for told in _apart(
                [
                    Visit(
                        visits.rank[row],
                        visits.end[row],
                        visits.waited[row],
                        visits.kind[row],
                        visits.last[row],
                        visits.said[row],
                        visits.pid[row],
                    )
                    for row in rows
                ]
            )
        ]
    _see_who_went_on(facts, [each for each in found if each.kind == WAITING])
    return sorted(found, key=lambda each: each.end)


def _see_who_went_on(facts: Facts, no_end: list[Round]) -> None:
    """Tell a barrier that nobody told the end of from one that had none."""
    # When each process that waited was at barriers: from when on, and until when.
    stays: dict[tuple[str, int, int], list[tuple[float, float]]] = {
        (seen.barrier.run_id, report.rank, report.pid): []
        for seen in no_end
        for report in seen.reports
        if report.rank != NOBODY
    }
    if not stays:
        return
    visits = facts.visits
    runs = [run_id for run_id, _ in facts.barriers]
    for row, end in enumerate(visits.end):
        process = runs[visits.barrier[row]], visits.rank[row], visits.pid[row]
        if process in stays:
            stays[process].append((end - visits.waited[row], end))
    ordered = {process: _in_order(found) for process, found in stays.items()}
    for seen in no_end:
        # Who was at another one before that has more than one thread.
        after = max(report.when for report in seen.reports) + _SAME_VISIT
        for report in seen.reports:
            # It warns again each time that the wait has doubled.
            due = report.when + report.waited + _SAME_VISIT
            process = seen.barrier.run_id, report.rank, report.pid
            later = ordered.get(process, [])
            place = bisect(later, (after, inf))
            if place < len(later):
                seen.went_on = True
                seen.seems_completed |= later[place][1] > due


def _in_order(stays: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Give when each stay began, and until when it, or any that began later, was."""
    backwards = sorted(stays, reverse=True)
    latest = accumulate((end for _, end in backwards), max)
    begun = (began for began, _ in backwards)
    return list(zip(begun, latest, strict=True))[::-1]


def _apart(told: Sequence[Visit]) -> Iterator[list[Visit]]:
    """Tell rounds apart: a new one begins when a rank comes back."""
    latest: dict[int, Visit] = {}
    nobodys: list[Visit] = []
    for visit in told:
        if visit.rank == NOBODY:
            nobodys.append(visit)
            continue
        before = latest.get(visit.rank)
        if before is None:
            latest[visit.rank] = visit
        elif visit.arrival <= before.end + _SAME_VISIT:
            latest[visit.rank] = _both(before, visit)
        else:
            yield [*latest.values(), *nobodys]
            latest, nobodys = {visit.rank: visit}, []
    if latest or nobodys:
        yield [*latest.values(), *nobodys]


def _both(one: Visit, other: Visit) -> Visit:
    """Make one of what is told of the same visit twice."""
    # What ended it says more than that it was going on.
    final = max(one, other, key=lambda each: (each.kind != WAITING, each.waited))
    warned, warned_at = max(one.warning, other.warning, key=lambda each: each[1])
    # A span does not have it.
    pid = max(one.pid, other.pid)
    final_twice = WAITING not in {one.kind, other.kind}
    return final._replace(
        # Who wrote later was held up in writing, not in the barrier.
        end=min(one.end, other.end) if final_twice else final.end,
        last=max(one.last, other.last),
        said=final.said or one.said or other.said,
        pid=pid,
        warned=warned,
        warned_at=warned_at,
    )


def _round(
    barrier: BarrierRecord, world_size: int, visits: list[Visit], said: list[Said]
) -> Round:
    kind = max(
        (visit.kind for visit in visits if visit.kind != WAITING), default=WAITING
    )
    named = [visit for visit in visits if visit.rank != NOBODY]
    by_clock = kind != COMPLETED
    start = min(visit.arrival for visit in visits)
    end = median(visit.end for visit in visits)
    if by_clock:
        late = array("d", (visit.arrival - start for visit in named))
    else:
        # All are let go at the same moment, so how long each waited, by its own clock,
        # says when it came: no two clocks are compared.
        through = [visit for visit in visits if visit.kind == COMPLETED]
        end = median(visit.end for visit in through)
        longest = max(visit.waited for visit in through)
        start = end - longest
        late = array(
            "d",
            (
                longest - visit.waited
                if visit.kind == COMPLETED
                # Its end is not known: this is what its last word says.
                else max(0.0, visit.arrival - start)
                for visit in named
            ),
        )
    lasts = Counter(visit.last for visit in visits if visit.last != NOBODY)
    last = NOBODY
    if kind == COMPLETED:
        if lasts:
            last = lasts.most_common(1)[0][0]
        elif named and len(named) == world_size:
            last = named[max(range(len(late)), key=late.__getitem__)].rank
    return Round(
        barrier=barrier,
        world_size=world_size,
        kind=kind,
        start=start,
        end=end,
        ranks=array("l", (visit.rank for visit in named)),
        late=late,
        ends=array("d", (visit.end for visit in named)),
        last=last,
        reports=[
            _report(visit, said[visit.said], said[visit.warned])
            for visit in visits
            if visit.said
        ],
        by_clock=by_clock,
    )


def _report(visit: Visit, said: Said, warned: Said) -> Report:
    by_end = bool(said.missing) or not warned.missing
    return Report(
        rank=visit.rank,
        pid=visit.pid,
        when=visit.end,
        waited=visit.waited,
        kind=visit.kind,
        said=said,
        warned=UNSAID if by_end else warned,
        looked=visit.end if by_end else visit.warned_at,
    )
