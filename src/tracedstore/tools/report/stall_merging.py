"""Merges the reports of a stalled job into stalls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class StallReport(NamedTuple):
    """One event `job.stalled` or `job.resumed`.

    Attributes:
        time: When it was logged, in seconds since 1970.
        run_id: Run id of the job; "" if not known.
        rank: The reporting rank, or NO_RANK.
        resumed: Whether it is `job.resumed`.
        phase: What the waiting ranks executed.
        cause: Why the awaited ranks did not arrive.
        awaited: The awaited ranks as text.
        awaited_ranks: The awaited ranks, as folded ranges.
        waiting_ranks: The waiting ranks, as folded ranges.
        key: A key that one of them waited for.
        waited: Seconds that the longest of these waits had lasted.
        evidence: How the cause is known.
        remedy: What to do.
    """

    time: float
    run_id: str
    rank: int
    resumed: bool
    phase: str
    cause: str
    awaited: str
    awaited_ranks: str
    waiting_ranks: str
    key: str
    waited: float
    evidence: tuple[str, ...]
    remedy: str

    @property
    def start(self) -> float:
        """When the longest of the waits began."""
        return self.time - self.waited


@dataclass(slots=True)
class Stall:
    """One wait of a job, as all ranks that reported it saw it.

    Attributes:
        last: The last report, which knows most.
        start: When the wait began.
        first_time: When it was first reported.
        resumed_at: When it ended; None if no end is logged.
        ranks: The ranks that reported it, NO_RANK for a process without one.
        causes: The reported causes, in the order of their first reports.
    """

    last: StallReport
    start: float
    first_time: float
    resumed_at: float | None
    ranks: set[int]
    causes: dict[str, None]

    @property
    def duration(self) -> float:
        """Seconds until it ended, or until the last report."""
        return max(0.0, (self.resumed_at or self.last.time) - self.start)

    def includes(self, report: StallReport) -> bool:
        """Return whether a later report is about this wait.

        A wait that began after the last report of this one is another wait.
        """
        of_same_phase = (report.run_id, report.phase) == (
            self.last.run_id,
            self.last.phase,
        )
        return of_same_phase and report.start <= self.last.time

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


def merge_reports(reports: Iterable[StallReport]) -> list[Stall]:
    """Return the stalls, ordered by their first reports.

    Reports of the same job and phase are of one stall if their waits overlap. The end
    of a stall that is not in the logs is ignored.
    """
    stalls: list[Stall] = []
    latest: dict[tuple[str, str], Stall] = {}
    for report in sorted(reports):
        stall = latest.get((report.run_id, report.phase))
        if stall is not None and stall.includes(report):
            stall.add(report)
        elif not report.resumed:
            stall = Stall(
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


def main_stall(stalls: Iterable[Stall]) -> Stall | None:
    """Return the last stall without an end, else the last one, else None."""
    return max(
        stalls,
        key=lambda stall: (stall.resumed_at is None, stall.last.time),
        default=None,
    )
