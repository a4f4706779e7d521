"""Groups barrier calls into barrier instances: the calls that waited for each other.

A restarted job uses the same key prefixes again, so a prefix may have several
instances. One call may be logged several times: as an event and as a span, in two
copies of a log, and as a `barrier.waiting` before its end.
"""

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf
from statistics import median
from typing import NamedTuple

from tracedstore.tools.report.logged_events import (
    COMPLETED,
    NO_DETAIL,
    NO_RANK,
    WAITING,
    BarrierId,
    EventDetail,
    LoggedBarrierCall,
    LoggedEvents,
)

# Seconds. A line is written shortly after the moment that it reports, so the times of
# one call differ by less. A restarted rank calls the barrier again later than that.
_SAME_CALL_TOLERANCE = 0.25


class RankReport(NamedTuple):
    """One rank's report of a barrier that did not complete, or not in time.

    Attributes:
        rank: The reporting rank.
        pid: Its process; 0 if not known.
        time: When it was logged.
        waited: Seconds that the rank had waited.
        outcome: Outcome of its call.
        detail: Details of the end, or of the last warning if the end is not known.
        warning: Details of the last warning, if only they name missing ranks.
        checked_at: When the rank determined which ranks were missing.
    """

    rank: int
    pid: int
    time: float
    waited: float
    outcome: int
    detail: EventDetail
    warning: EventDetail
    checked_at: float

    @property
    def missing(self) -> str:
        """The missing ranks that it named last, as folded ranges."""
        return self.detail.missing or self.warning.missing


@dataclass(slots=True, eq=False)
class BarrierInstance:
    """One use of a barrier's key prefix.

    Attributes:
        id: The key prefix and its job.
        world_size: Number of ranks that the barrier is for.
        outcome: The worst outcome of its calls; WAITING if no end is logged.
        start: When the first rank arrived.
        end: When it completed or was given up.
        ranks: Ranks whose arrival is known.
        delays: Seconds from the first arrival to the arrival of each of these ranks.
        ends: When the call of each of these ranks ended, by the clock of its host.
        last_rank: The rank that arrived last, or NO_RANK.
        reports: Reports of ranks that waited.
        continued: No end is logged, but a process that had waited at this instance
            arrived at another barrier after the last report. Either the instance has
            completed, or the process has several threads. Completions are events of
            debug level, which most logs do not contain.
        presumed_completed: ``continued`` is set, and the process was still logging when
            its next warning for this instance was due, and did not log one.
    """

    id: BarrierId
    world_size: int
    outcome: int
    start: float
    end: float
    ranks: "array[int]"
    delays: "array[float]"
    ends: "array[float]"
    last_rank: int
    reports: list[RankReport]
    continued: bool = False
    presumed_completed: bool = False

    @property
    def completed(self) -> bool:
        """Whether all ranks arrived, as logged or as presumed."""
        return self.outcome == COMPLETED or self.presumed_completed

    @property
    def spread(self) -> float:
        """Seconds between the first and the last arrival."""
        return max(self.delays, default=0.0)

    @property
    def median_delay(self) -> float:
        """Seconds until half of the ranks had arrived."""
        return median(self.delays) if self.delays else 0.0

    @property
    def last_report_time(self) -> float:
        """When the last report was logged."""
        return max(report.time for report in self.reports)

    @property
    def longest_wait(self) -> float:
        """The longest wait that a rank reported, in seconds."""
        return max(report.waited for report in self.reports)


def barrier_instances(logged: LoggedEvents) -> list[BarrierInstance]:
    """Return all barrier instances, ordered by their ends."""
    columns, barrier_ids = logged.barrier_calls, list(logged.barrier_ids)
    # By barrier, and the calls of a barrier by their ends.
    rows = sorted(range(len(columns)), key=columns.end.__getitem__)
    rows.sort(key=columns.barrier.__getitem__)
    instances = [
        _instance(
            BarrierId(*barrier_ids[index]),
            logged.world_sizes[index],
            calls,
            logged.details,
        )
        for index, of_barrier in groupby(rows, key=columns.barrier.__getitem__)
        for calls in _split_instances(map(columns.call, of_barrier))
    ]
    _mark_continued(logged, [each for each in instances if each.outcome == WAITING])
    return sorted(instances, key=lambda each: each.end)


def _mark_continued(logged: LoggedEvents, unfinished: list[BarrierInstance]) -> None:
    """Set ``continued`` and ``presumed_completed`` of instances without an end."""
    # From when to when each of the waiting processes was at any barrier.
    intervals: dict[tuple[str, int, int], list[tuple[float, float]]] = {
        (instance.id.run_id, report.rank, report.pid): []
        for instance in unfinished
        for report in instance.reports
        if report.rank != NO_RANK
    }
    if not intervals:
        return
    columns = logged.barrier_calls
    run_ids = [run_id for run_id, _ in logged.barrier_ids]
    for row, end in enumerate(columns.end):
        process = run_ids[columns.barrier[row]], columns.rank[row], columns.pid[row]
        if process in intervals:
            intervals[process].append((end - columns.waited[row], end))
    ordered = {process: _by_start(items) for process, items in intervals.items()}
    for instance in unfinished:
        # A process that arrived at another barrier before has several threads.
        after = instance.last_report_time + _SAME_CALL_TOLERANCE
        for report in instance.reports:
            # A rank warns again each time that the wait has doubled.
            next_warning = report.time + report.waited + _SAME_CALL_TOLERANCE
            process = instance.id.run_id, report.rank, report.pid
            later = ordered.get(process, [])
            position = bisect(later, (after, inf))
            if position < len(later):
                instance.continued = True
                instance.presumed_completed |= later[position][1] > next_warning


def _by_start(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort intervals by start. Each end becomes the latest end from there on."""
    backwards = sorted(intervals, reverse=True)
    latest_ends = accumulate((end for _, end in backwards), max)
    starts = (start for start, _ in backwards)
    return list(zip(starts, latest_ends, strict=True))[::-1]


def _split_instances(
    calls: Iterable[LoggedBarrierCall],
) -> Iterator[list[LoggedBarrierCall]]:
    """Split the calls of a prefix: a new instance starts when a rank arrives again."""
    latest: dict[int, LoggedBarrierCall] = {}
    without_rank: list[LoggedBarrierCall] = []
    for call in calls:
        if call.rank == NO_RANK:
            without_rank.append(call)
            continue
        previous = latest.get(call.rank)
        if previous is None:
            latest[call.rank] = call
        elif call.arrival <= previous.end + _SAME_CALL_TOLERANCE:
            latest[call.rank] = _merge(previous, call)
        else:
            yield [*latest.values(), *without_rank]
            latest, without_rank = {call.rank: call}, []
    if latest or without_rank:
        yield [*latest.values(), *without_rank]


def _merge(one: LoggedBarrierCall, other: LoggedBarrierCall) -> LoggedBarrierCall:
    """Merge two records of the same call."""
    # The end of a call takes precedence over a warning.
    final = max(one, other, key=lambda each: (each.outcome != WAITING, each.waited))
    warning_detail, warning_time = max(
        one.last_warning, other.last_warning, key=lambda warning: warning[1]
    )
    both_final = WAITING not in {one.outcome, other.outcome}
    return final._replace(
        # The later record was written late; the call had ended before.
        end=min(one.end, other.end) if both_final else final.end,
        last_rank=max(one.last_rank, other.last_rank),
        detail=final.detail or one.detail or other.detail,
        # A span has no pid.
        pid=max(one.pid, other.pid),
        warning_detail=warning_detail,
        warning_time=warning_time,
    )


def _instance(
    barrier_id: BarrierId,
    world_size: int,
    calls: list[LoggedBarrierCall],
    details: list[EventDetail],
) -> BarrierInstance:
    outcome = max(
        (call.outcome for call in calls if call.outcome != WAITING), default=WAITING
    )
    with_rank = [call for call in calls if call.rank != NO_RANK]
    last_rank = NO_RANK
    if outcome == COMPLETED:
        # All ranks are released at the same moment, so the arrival of each follows from
        # its wait, by its own clock: no two clocks are compared.
        released = [call for call in calls if call.outcome == COMPLETED]
        end = median(call.end for call in released)
        longest = max(call.waited for call in released)
        start = end - longest
        delays = array(
            "d",
            (
                longest - call.waited
                if call.outcome == COMPLETED
                # The end of this call is not logged: its last warning has to do.
                else max(0.0, call.arrival - start)
                for call in with_rank
            ),
        )
        logged = Counter(call.last_rank for call in calls if call.last_rank != NO_RANK)
        if logged:
            last_rank = logged.most_common(1)[0][0]
        elif with_rank and len(with_rank) == world_size:
            last_rank = with_rank[delays.index(max(delays))].rank
    else:
        end = median(call.end for call in calls)
        start = min(call.arrival for call in calls)
        delays = array("d", (call.arrival - start for call in with_rank))
    return BarrierInstance(
        id=barrier_id,
        world_size=world_size,
        outcome=outcome,
        start=start,
        end=end,
        ranks=array("l", (call.rank for call in with_rank)),
        delays=delays,
        ends=array("d", (call.end for call in with_rank)),
        last_rank=last_rank,
        reports=[
            _report(call, details[call.detail], details[call.warning_detail])
            for call in calls
            if call.detail
        ],
    )


def _report(
    call: LoggedBarrierCall, detail: EventDetail, warning: EventDetail
) -> RankReport:
    use_detail = bool(detail.missing) or not warning.missing
    return RankReport(
        rank=call.rank,
        pid=call.pid,
        time=call.end,
        waited=call.waited,
        outcome=call.outcome,
        detail=detail,
        warning=NO_DETAIL if use_detail else warning,
        checked_at=call.end if use_detail else call.warning_time,
    )
