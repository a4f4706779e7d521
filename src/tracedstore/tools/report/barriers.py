"""A barrier as all ranks saw it, and their reports of it."""

from array import array
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from tracedstore.tools.report.record_types import COMPLETED, BarrierId, EventDetail


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
