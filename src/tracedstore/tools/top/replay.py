"""A finished job at any time of its run, from its logs."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from tracedstore.common.ranges import unfold
from tracedstore.common.text import duration
from tracedstore.naming.decoders import describe_missing
from tracedstore.tools.report.analysis import Analysis, LoggedStall
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.logged_events import NO_RANK, WAITING
from tracedstore.tools.top.model import Barrier, Level, Model, Rank, State

# Ranks that are shown; those of a world size in a log may be a million.
_MAX_RANKS = 65_536
_MAX_FINISHED = 64
_MAX_ABANDONED = 16
# Seconds a barrier may take before the ranks that arrive later are awaited.
_AWAITED_AFTER = 5.0
_STATES: Mapping[str, State] = {
    "gone": State.GONE,
    "stopped": State.STOPPED,
    "not_started": State.NOT_STARTED,
}


class Replay:
    """A finished job.

    Args:
        source: The names of the logs.
        analysis: What the logs contain.

    Attributes:
        start: The time of the first event, in seconds since the epoch.
        end: The time of the last one.
        incidents: When something went wrong, in order.
    """

    def __init__(self, source: str, analysis: Analysis) -> None:
        self.analysis = analysis
        records = analysis.logged
        barriers = analysis.barriers
        self.start = min([records.first_time, *(one.start for one in barriers)])
        self.end = records.last_time
        self.incidents = sorted(
            {
                *(stall.first_time for stall in analysis.stalls),
                *(failure.time for _, failure in analysis.failures[:1]),
                *(
                    min(report.time for report in one.barrier.reports)
                    for one in analysis.incidents
                    if one.barrier.reports
                ),
            }
        )
        self._source = source
        self._completed = [one for one in barriers if one.completed]
        self._ends = [one.end for one in self._completed]
        self._incomplete = [one for one in barriers if not one.completed]
        self._stalls = [(one, self._end_of_stall(one)) for one in analysis.stalls]
        known = {*records.last_events, *range(min(records.world_size, _MAX_RANKS))}
        self._ranks = {
            number: Rank(
                rank=number,
                host=records.host(number),
                state=State.RUNNING,
            )
            for number in sorted(known)[:_MAX_RANKS]
        }

    def model(self, time: float) -> Model:
        """Return the job as the logs have it at a time."""
        waiting = list(self._waiting(time))
        stalls = [
            stall for stall, end in self._stalls if stall.first_time <= time < end
        ]
        ranks = dict(self._ranks)
        for barrier, late in waiting:
            if not barrier.abandoned:
                _set_states(ranks, barrier, time, late=late)
        for stall in stalls:
            _set_awaited(ranks, stall, time)
        count = bisect_right(self._ends, time)
        newest = self._completed[max(0, count - _MAX_FINISHED) : count]
        level, headline, details = self._headline(time, stalls, waiting)
        return Model(
            source=self._source,
            time=time,
            level=level,
            headline=headline,
            details=details,
            ranks=tuple(ranks.values()),
            in_progress=tuple(barrier for barrier, _ in waiting),
            finished=tuple(self._barrier(one, one.end) for one in newest),
            more_finished=count - len(newest),
        )

    def _end_of_stall(self, stall: LoggedStall) -> float:
        """Return when a stall ended.

        Its end may not be in the logs, because the process that reported it was
        killed. A later barrier that completes shows that the job went on.
        """
        if stall.resumed_at is not None:
            return stall.resumed_at
        later = (
            one.start
            for one in self._completed
            if one.start > stall.last.time and one.id.run_id == stall.last.run_id
        )
        return min(later, default=inf)

    def _waiting(self, time: float) -> Iterator[tuple[Barrier, bool]]:
        """Yield the barriers that are not complete, and whether they are late."""
        ended = [one for one in self._incomplete if _end_of(one) <= time]
        for one in ended[-_MAX_ABANDONED:]:
            yield replace(self._barrier(one, one.end), abandoned=True), False
        for one in (*self._incomplete, *self._completed):
            if one.start <= time < _end_of(one):
                reported = any(report.time <= time for report in one.reports)
                late = reported or time - one.start >= _AWAITED_AFTER
                yield self._barrier(one, time), late

    def _barrier(self, one: BarrierInstance, time: float) -> Barrier:
        arrived = sorted(
            (one.start + delay, rank)
            for rank, delay in zip(one.ranks, one.delays, strict=True)
            if one.start + delay <= time
        )
        there = {rank for _, rank in arrived}
        complete = one.completed and time >= one.end
        missing = () if complete else tuple(self._missing(one, there))
        last = arrived[-1][0] if arrived else one.start
        return Barrier(
            prefix=one.id.prefix,
            complete=complete,
            arrived=one.world_size if complete else len(arrived),
            world_size=one.world_size or None,
            missing=describe_missing(missing, one.world_size, self._name)
            if missing
            else "",
            missing_ranks=missing,
            ranks=array("l", (rank for _, rank in arrived)),
            times=array("d", (at for at, _ in arrived)),
            first=one.start,
            last=last,
            last_rank=None if one.last_rank == NO_RANK else one.last_rank,
            last_host=self.analysis.logged.host(one.last_rank) or None,
        )

    def _missing(self, one: BarrierInstance, arrived: set[int]) -> list[int]:
        """Return who has not arrived: reported missing, or known to arrive later."""
        reported = {
            rank
            for report in one.reports
            for rank in unfold(report.missing, _MAX_RANKS)
        }
        return sorted((reported | set(one.ranks)) - arrived)

    def _name(self, rank: int) -> str:
        return self.analysis.logged.host(rank) or f"rank {rank}"

    def _headline(
        self,
        time: float,
        stalls: list[LoggedStall],
        waiting: list[tuple[Barrier, bool]],
    ) -> tuple[Level, str, tuple[str, ...]]:
        for stall in reversed(stalls):
            report = stall.last
            text = f"stalled in {report.phase} for {duration(time - stall.start)}:"
            details = (f"cause: {report.cause}", *report.evidence, report.remedy)
            return "bad", f"{text} waiting for {report.awaited}", details
        for barrier, late in waiting:
            if barrier.missing and late:
                age = duration(time - (barrier.first or time))
                waits = f"barrier {barrier.prefix} waits for {age}"
                return "bad", f"{waits}: {barrier.missing}", ()
        for process, failure in self.analysis.failures[:1]:
            if failure.time <= time:
                who = f"rank {process.rank}" if process.rank != NO_RANK else "a process"
                host = process.host or self.analysis.logged.host(process.rank)
                where = f" on {host}" if host else ""
                ago = duration(time - failure.time)
                text = f"first failure {ago} ago, {who}{where}: {failure.subject}"
                return "bad", f"{text}: {failure.error}", ()
        return "good", "the logs report no long wait and no failure up to here", ()


def _end_of(one: BarrierInstance) -> float:
    """Return when a barrier completed or was given up; inf if it was neither."""
    if one.completed:
        return one.end
    if one.outcome == WAITING and not one.continued:
        return inf
    return max(one.ends, default=one.end)


def _set_states(
    ranks: dict[int, Rank], barrier: Barrier, time: float, *, late: bool
) -> None:
    at = f"at barrier {barrier.prefix}"
    for number, since in zip(barrier.ranks, barrier.times, strict=True):
        if rank := ranks.get(number):
            ranks[number] = replace(
                rank, state=State.WAITING, doing=at, waited=time - since
            )
    if not late:
        return
    age = time - (barrier.first or time)
    for number in barrier.missing_ranks:
        if rank := ranks.get(number):
            missing = f"missing {at}"
            ranks[number] = replace(
                rank, state=State.AWAITED, doing=missing, waited=age
            )


def _set_awaited(ranks: dict[int, Rank], stall: LoggedStall, time: float) -> None:
    report = stall.last
    waited = time - stall.start
    for text, state in (
        (report.waiting_ranks, State.WAITING),
        (report.awaited_ranks, _STATES.get(report.cause, State.AWAITED)),
    ):
        try:
            numbers = unfold(text, _MAX_RANKS)
        except ValueError:  # a log may have any text
            continue
        for number in numbers:
            if rank := ranks.get(number):
                doing = f"{report.phase}: {report.awaited}"
                ranks[number] = replace(rank, state=state, doing=doing, waited=waited)
