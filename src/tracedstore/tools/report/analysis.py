"""Finds missing ranks, stragglers, stalls, first failures and clock offsets in logs."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from tracedstore.common.ranges import fold, unfold
from tracedstore.common.text import timestamp
from tracedstore.tools.job_view import StallView
from tracedstore.tools.report.barriers import (
    BarrierInstance,
    RankReport,
    barrier_instances,
)
from tracedstore.tools.report.failure_kinds import FailureKind
from tracedstore.tools.report.failures import FailureGroup, failure_groups
from tracedstore.tools.report.flight_dumps import judge_dumps
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.logged_events import (
    COMPLETED,
    FAILED,
    NO_RANK,
    TIMEOUT,
    EventDetail,
    LoggedEvents,
    StallReport,
)

# Seconds. Smaller differences are the time that the store takes to release a rank.
CLOCK_TOLERANCE: Final = 0.05
# Seconds by which a report has to be later than another one to supersede it, because
# the clocks of hosts differ.
_SUPERSEDES_AFTER = 1.0
# Barriers that are required to compare the clock of a host.
_MIN_CLOCK_SAMPLES = 3


@dataclass(slots=True)
class StragglerStats:
    """A rank that arrived last or was missing.

    The lag of a rank at a barrier is the time between the arrival of half of the ranks
    and its own arrival; it is negative if the rank was early.

    Attributes:
        rank: The rank.
        last_count: Completed barriers at which it arrived last.
        missing_count: Barriers at which it was reported missing and did not arrive.
        barrier_count: Completed barriers at which its arrival is known.
        cost: Sum of its lags where it arrived last, in seconds.
        median_lag: Median of its lags, in seconds.
        worst_lag: The largest of its lags, in seconds.
        worst_prefix: Key prefix of the barrier with the largest lag.
    """

    rank: int
    last_count: int = 0
    missing_count: int = 0
    barrier_count: int = 0
    cost: float = 0.0
    median_lag: float = 0.0
    worst_lag: float = 0.0
    worst_prefix: str = ""


@dataclass(slots=True)
class ReportGroup:
    """Reports of an incident that claim the same.

    Attributes:
        detail: Details of the end, or of the last warning if the end is not known.
        warning: Details of the last warning, if only they name missing ranks.
        reports: The reports.
    """

    detail: EventDetail
    warning: EventDetail
    reports: list[RankReport] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The reporting ranks."""
        return [report.rank for report in self.reports]

    @property
    def first_time(self) -> float:
        """When the first of them was logged."""
        return min(report.time for report in self.reports)

    @property
    def longest_wait(self) -> float:
        """The longest wait that one of them reports, in seconds."""
        return max(report.waited for report in self.reports)


@dataclass(slots=True)
class Incident:
    """A barrier that did not complete, or that ranks reported while they waited.

    Attributes:
        barrier: The barrier.
        groups: The reports, grouped by what they claim; the largest group first.
        missing: Ranks that were reported missing and did not arrive.
        late: Ranks that were reported missing and arrived later.
        checked_at: When a rank last determined the missing ranks; 0 if none did.
    """

    barrier: BarrierInstance
    groups: list[ReportGroup]
    missing: list[int]
    late: list[int]
    checked_at: float


@dataclass(slots=True)
class LoggedStall:
    """One wait of a job, as all ranks that reported it saw it.

    Attributes:
        last: The last report, which knows most.
        start: When the wait began.
        first_time: When it was first reported.
        resumed_at: When it ended; None if no end is logged.
        ranks: The ranks that reported it, NO_RANK for a process without one.
        causes: The reported causes, in the order of their first reports.
        end: "timed out" or "failed" if the barrier that it waited at did; else "".
        is_dumped: It is from dumps of Flight Recorder, and no rank reported it.
    """

    last: StallReport
    start: float
    first_time: float
    resumed_at: float | None
    ranks: set[int]
    causes: dict[str, None]
    end: str = ""
    is_dumped: bool = False

    @property
    def duration(self) -> float:
        """Seconds until it ended, or until the last report."""
        return max(0.0, (self.resumed_at or self.last.time) - self.start)

    def view(self) -> StallView:
        """Return it as all tools show it."""
        last = self.last
        return StallView(
            phase=last.phase,
            awaited=last.awaited,
            named=bool(last.awaited_ranks),
            cause=last.cause,
            evidence=last.evidence,
            remedy=last.remedy,
            start=self.start,
            reported=last.time,
            waits=self.resumed_at is None,
        )

    def add(self, report: StallReport) -> None:
        """Add a later report of this wait."""
        self.ranks.add(report.rank)
        if report.resumed:
            self.resumed_at = report.time
            return
        # Another rank resumed before; this one still waits.
        self.resumed_at = None
        self.last = report
        self.start = min(self.start, report.start)
        self.causes.setdefault(report.cause)


@dataclass(slots=True)
class Analysis:
    """Everything that the page shows.

    Attributes:
        logged: The events.
        output: What the logs contain besides events.
        barriers: All barriers, ordered by their ends.
        incidents: Barriers that did not complete, then barriers that may have
            completed, then barriers that completed late.
        stragglers: Ranks that were missing or last, the worst first.
        failures: The failures of all processes, the causes first.
        stalls: Waits of the whole job, ordered by their first reports.
        clock_offsets: Seconds by which the clock of each host is ahead of most others.
    """

    logged: LoggedEvents
    output: JobOutput
    barriers: list[BarrierInstance]
    incidents: list[Incident]
    stragglers: list[StragglerStats]
    failures: list[FailureGroup]
    stalls: list[LoggedStall]
    clock_offsets: dict[str, float]

    @property
    def ranks(self) -> list[int]:
        """Ranks that logged an event or printed a line themselves."""
        printed = {self.output.rank(source) for source in self.output.lines}
        printed.update(self.output.dumps)
        printed.update(*(group.ranks for group in self.failures))
        return sorted(printed.union(self.logged.last_events) - {NO_RANK})

    @property
    def ended(self) -> list[FailureGroup]:
        """The failures, without exceptions that the job caught."""
        return [
            group
            for group in self.failures
            if group.failure.kind is not FailureKind.CAUGHT
        ]

    @property
    def open_stalls(self) -> list[LoggedStall]:
        """Stalls without an end."""
        return [stall for stall in self.stalls if not (stall.resumed_at or stall.end)]

    @property
    def incident_count(self) -> int:
        """Stalls, and barriers that did not complete or that ranks reported.

        A stall at a barrier and that barrier are one.
        """
        barriers = {each.barrier.id.prefix for each in self.incidents}
        others = [
            stall
            for stall in self.stalls
            if not any(stall.last.key.startswith(f"{prefix}/") for prefix in barriers)
        ]
        return len(self.incidents) + len(others)

    @property
    def times(self) -> tuple[float, float]:
        """The first and the last known time, 0 and 0 if there is none."""
        times = [each.failure.time for each in self.failures if each.failure.time]
        times += [self.logged.first_time, self.logged.last_time]
        times += [each.last.time for each in self.stalls if each.is_dumped]
        known = [each for each in times if 0 < each < inf]
        return (min(known), max(known)) if known else (0.0, 0.0)

    @property
    def known_ranks(self) -> list[int]:
        """Ranks that logged an event or were reported missing."""
        known = set(self.logged.last_events)
        known.update(*(incident.missing for incident in self.incidents))
        return sorted(known)

    @property
    def jobs(self) -> list[str]:
        """Run ids of the jobs that have one."""
        return sorted({run_id for run_id, _ in self.logged.barrier_ids if run_id})

    def format_time(self, time: float) -> str:
        """Format a time in UTC, with the date if the logs are of more than one day."""
        first, last = (timestamp(each)[:10] for each in self.times)
        return timestamp(time)[11 if first == last else 0 :]

    def clock_offset(self, host: str) -> float:
        """Return by how much a clock is ahead; 0 within the tolerance or if unknown."""
        offset = self.clock_offsets.get(host, 0.0)
        return offset if abs(offset) > CLOCK_TOLERANCE else 0.0


def analyse(logged: LoggedEvents, output: JobOutput | None = None) -> Analysis:
    """Analyse the logs of one or more jobs."""
    output = output or JobOutput()
    barriers = barrier_instances(logged)
    incidents = [_incident(each) for each in barriers if each.reports]
    incidents.sort(
        key=lambda incident: (
            incident.barrier.completed,
            incident.barrier.continued,
            incident.barrier.start,
        )
    )
    stalls = _merge_reports(logged.stall_reports)
    _add_ends(stalls, incidents)
    dumped = _dumped_stall(logged, output)
    # What a rank logged about the same wait says more, such as what the others did.
    if dumped is not None and dumped.last.phase not in {
        each.last.phase for each in stalls if each.resumed_at is None
    }:
        stalls.append(dumped)
    return Analysis(
        logged=logged,
        output=output,
        barriers=barriers,
        incidents=incidents,
        stragglers=_stragglers(barriers, incidents),
        failures=failure_groups(logged, output),
        stalls=stalls,
        clock_offsets=_clock_offsets(logged, barriers),
    )


def _dumped_stall(logged: LoggedEvents, output: JobOutput) -> LoggedStall | None:
    """Return the wait that the dumps of Flight Recorder show, if they show one."""
    verdict = judge_dumps(output.dumps, logged.world_size, logged.host)
    if verdict is None:
        return None
    report = StallReport(
        time=verdict.time,
        run_id="",
        rank=NO_RANK,
        resumed=False,
        phase=verdict.phase,
        cause=verdict.cause,
        awaited=verdict.describe_awaited(verdict.time),
        awaited_ranks=fold(verdict.awaited_ranks),
        waiting_ranks=fold(verdict.waiting_ranks),
        key="",
        waited=verdict.waited_seconds,
        evidence=verdict.evidence,
        remedy=verdict.remedy,
    )
    return LoggedStall(
        last=report,
        start=report.start,
        first_time=report.time,
        resumed_at=None,
        ranks=set(output.dumps),
        causes={verdict.cause: None},
        is_dumped=True,
    )


def _incident(barrier: BarrierInstance) -> Incident:
    groups: dict[tuple[str, str], ReportGroup] = {}
    for report in barrier.reports:
        key = report.detail.claim, report.warning.claim
        group = groups.setdefault(key, ReportGroup(report.detail, report.warning))
        group.reports.append(report)
    reported: dict[int, float] = {}
    checked_at, missing_at_last = 0.0, frozenset[int]()
    for group in groups.values():
        missing = frozenset(unfold(group.reports[0].missing))
        time = max(report.checked_at for report in group.reports)
        for rank in missing:
            reported[rank] = max(time, reported.get(rank, 0.0))
        if missing and time > checked_at:
            checked_at, missing_at_last = time, missing
    # A rank has arrived if a later report does not name it any more.
    arrived = set(barrier.ranks) | {
        rank
        for rank, time in reported.items()
        if rank not in missing_at_last and time < checked_at - _SUPERSEDES_AFTER
    }
    if barrier.completed:
        arrived |= reported.keys()
    return Incident(
        barrier=barrier,
        groups=sorted(groups.values(), key=lambda group: -len(group.reports)),
        missing=sorted(reported.keys() - arrived),
        late=sorted(reported.keys() & arrived),
        checked_at=checked_at,
    )


def _stragglers(
    barriers: Sequence[BarrierInstance], incidents: Sequence[Incident]
) -> list[StragglerStats]:
    by_rank: dict[int, StragglerStats] = {}
    lags: dict[int, array[float]] = defaultdict(lambda: array("f"))
    for barrier in barriers:
        if barrier.outcome == COMPLETED:
            _add_lags(barrier, by_rank, lags)
    for incident in incidents:
        for rank in incident.missing:
            by_rank.setdefault(rank, StragglerStats(rank)).missing_count += 1
    for rank, straggler in by_rank.items():
        if of_rank := lags.get(rank):
            straggler.barrier_count = len(of_rank)
            straggler.median_lag = median(of_rank)
    return sorted(
        (each for each in by_rank.values() if each.last_count or each.missing_count),
        key=lambda each: (
            -each.missing_count,
            -each.cost,
            -each.last_count,
            each.rank,
        ),
    )


def _add_lags(
    barrier: BarrierInstance,
    by_rank: dict[int, StragglerStats],
    lags: dict[int, "array[float]"],
) -> None:
    last_rank = barrier.last_rank
    if last_rank != NO_RANK:
        by_rank.setdefault(last_rank, StragglerStats(last_rank)).last_count += 1
    median_delay = barrier.median_delay
    for rank, delay in zip(barrier.ranks, barrier.delays, strict=True):
        lag = delay - median_delay
        lags[rank].append(lag)
        if lag > 0:
            straggler = by_rank.setdefault(rank, StragglerStats(rank))
            if rank == last_rank:
                straggler.cost += lag
            if lag > straggler.worst_lag:
                straggler.worst_lag = lag
                straggler.worst_prefix = barrier.id.prefix


def _clock_offsets(
    logged: LoggedEvents, barriers: Sequence[BarrierInstance]
) -> dict[str, float]:
    """Compare clocks at the ends of barriers, which are simultaneous for all ranks."""
    differences: dict[str, array[float]] = defaultdict(lambda: array("f"))
    for barrier in barriers:
        if barrier.outcome == COMPLETED and not barrier.reports:
            for rank, end in zip(barrier.ranks, barrier.ends, strict=True):
                differences[logged.host(rank)].append(end - barrier.end)
    return {
        host: median(of_host)
        for host, of_host in sorted(differences.items())
        if host and len(of_host) >= _MIN_CLOCK_SAMPLES
    }


def count_outcomes(barriers: Sequence[BarrierInstance]) -> Counter[int]:
    """Count barriers by outcome, except presumed completions."""
    return Counter(each.outcome for each in barriers if not each.presumed_completed)


def _merge_reports(reports: Iterable[StallReport]) -> list[LoggedStall]:
    """Return the stalls, ordered by their first reports.

    Reports of the same job and phase are of one stall if their waits overlap. The end
    of a stall that is not in the logs is ignored.
    """
    stalls: list[LoggedStall] = []
    latest: dict[tuple[str, str], LoggedStall] = {}
    for report in sorted(reports):
        stall = latest.get((report.run_id, report.phase))
        # A wait that began after the last report of this one is another wait.
        if stall is not None and report.start <= stall.last.time:
            stall.add(report)
        elif not report.resumed:
            stall = LoggedStall(
                last=report,
                start=report.start,
                first_time=report.time,
                resumed_at=None,
                ranks={report.rank},
                causes={report.cause: None},
            )
            stalls.append(stall)
            latest[report.run_id, report.phase] = stall
    return stalls


def _add_ends(stalls: Iterable[LoggedStall], incidents: Iterable[Incident]) -> None:
    """Set the end of stalls at barriers that timed out or failed."""
    ended = [
        each.barrier
        for each in incidents
        if each.barrier.outcome in {TIMEOUT, FAILED} and not each.barrier.completed
    ]
    for stall in stalls:
        for barrier in ended:
            at_barrier = stall.last.key.startswith(f"{barrier.id.prefix}/")
            same_job = stall.last.run_id == barrier.id.run_id
            last_time = barrier.last_report_time + _SUPERSEDES_AFTER
            if (
                stall.resumed_at is None
                and at_barrier
                and same_job
                and barrier.start <= stall.last.time <= last_time
            ):
                stall.end = "timed out" if barrier.outcome == TIMEOUT else "failed"


def main_stall(stalls: Iterable[LoggedStall]) -> LoggedStall | None:
    """Return the last stall without an end, else the last one, else None."""
    return max(
        stalls,
        key=lambda stall: (stall.resumed_at is None, stall.last.time),
        default=None,
    )
