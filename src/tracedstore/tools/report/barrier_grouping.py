"""Groups barrier calls into barrier instances: the calls that waited for each other.

A restarted job uses the same key prefixes again, so a prefix may have several
instances. One call may be logged several times: as an event and as a span, in two
copies of a log, and as a `barrier.waiting` before its end.
"""

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple

from tracedstore.tools.report.barriers import BarrierInstance, RankReport
from tracedstore.tools.report.event_fields import NO_RANK
from tracedstore.tools.report.record_types import (
    COMPLETED,
    NO_DETAIL,
    NO_DETAIL_INDEX,
    WAITING,
    BarrierId,
    EventDetail,
)
from tracedstore.tools.report.records import Records

# Seconds. A line is written shortly after the moment that it reports, so the times of
# one call differ by less. A restarted rank calls the barrier again later than that.
_SAME_CALL_TOLERANCE = 0.25


class LoggedBarrierCall(NamedTuple):
    """One rank's barrier call. The fields are those of BarrierCallColumns.

    Attributes:
        warning_detail: Position of the details of its last warning in Records.details,
            where the call has another outcome than WAITING.
        warning_time: When that warning was logged.
    """

    rank: int
    end: float
    waited: float
    outcome: int
    last_rank: int
    detail: int
    pid: int
    warning_detail: int = NO_DETAIL_INDEX
    warning_time: float = 0.0

    @property
    def arrival(self) -> float:
        """When the rank arrived, by the clock of its host."""
        return self.end - self.waited

    @property
    def last_warning(self) -> tuple[int, float]:
        """Details and time of the last warning."""
        if self.outcome == WAITING:
            return self.detail, self.end
        return self.warning_detail, self.warning_time


def barrier_instances(records: Records) -> list[BarrierInstance]:
    """Return all barrier instances, ordered by their ends."""
    columns = records.barrier_calls
    order = sorted(range(len(columns)), key=columns.barrier.__getitem__)
    instances: list[BarrierInstance] = []
    begin = 0
    for index, barrier_id in enumerate(records.barrier_ids):
        end = begin
        while end < len(order) and columns.barrier[order[end]] == index:
            end += 1
        rows = sorted(order[begin:end], key=columns.end.__getitem__)
        begin = end
        calls = [
            LoggedBarrierCall(
                columns.rank[row],
                columns.end[row],
                columns.waited[row],
                columns.outcome[row],
                columns.last_rank[row],
                columns.detail[row],
                columns.pid[row],
            )
            for row in rows
        ]
        instances += [
            _instance(
                BarrierId(*barrier_id),
                records.world_sizes[index],
                members,
                records.details,
            )
            for members in _split_instances(calls)
        ]
    _mark_continued(records, [each for each in instances if each.outcome == WAITING])
    return sorted(instances, key=lambda each: each.end)


def _mark_continued(records: Records, unfinished: list[BarrierInstance]) -> None:
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
    columns = records.barrier_calls
    run_ids = [run_id for run_id, _ in records.barrier_ids]
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
    calls: Sequence[LoggedBarrierCall],
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
