"""The screen of a finished job, which plays its logs back."""

import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from tracedstore.common.ranges import unfold
from tracedstore.common.text import duration
from tracedstore.naming.decoders import describe_missing
from tracedstore.tools.job_view import (
    BarrierView,
    JobView,
    Level,
    RankState,
    RankStates,
    RankView,
    awaited_state,
)
from tracedstore.tools.report.analysis import Analysis, LoggedStall
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.failures import FailureGroup
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import NO_RANK, WAITING
from tracedstore.tools.top.app import TopApp
from tracedstore.tools.top.rows import Span, TextRow, pad, row, shorten
from tracedstore.tools.top.saving import page_files

# Ranks that are shown; those of a world size in a log may be a million.
_MAX_RANKS = 65_536
_MAX_FINISHED = 64
_MAX_ABANDONED = 16
# Seconds a barrier may take before the ranks that arrive later are awaited.
_AWAITED_AFTER = 5.0
# Times as fast as the job ran.
_SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1000.0, 3600.0)
# Seconds that a whole job should take at first.
_WHOLE = 60.0
_STEPS_A_SECOND = 5
# What a verdict tells about ranks: their hosts, and ages as of the time of the report.
_HOST = re.compile(r"\brank (\d{1,7}) on (\S{1,253})(?: \(pid|:|,|;|$)")
_AGE = re.compile(r"\b(no store call|its agent has been silent) for (\d{1,9}) s\b")


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
                *(group.failure.time for group in self._failures()),
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
        # A rank that hangs before its first event logs nothing: others name its host.
        named = {
            int(rank): host
            for stall in analysis.stalls
            for rank, host in _HOST.findall(stall.last.awaited)
        }
        known = {*records.last_events, *range(min(records.world_size, _MAX_RANKS))}
        known |= named.keys()
        self._ranks = [
            RankView(
                rank=number,
                host=records.host(number) or named.get(number, ""),
                state=RankState.RUNNING,
            )
            for number in sorted(known)[:_MAX_RANKS]
        ]

    def view(self, time: float) -> JobView:
        """Return the job as the logs have it at a time."""
        barriers = list(self._unfinished(time))
        stalls = [
            stall for stall, end in self._stalls if stall.first_time <= time < end
        ]
        states = RankStates()
        for rank in self._ranks:
            states.add(rank)
        for barrier in barriers:
            if not barrier.abandoned:
                states.add_barrier(barrier, time)
        for stall in stalls:
            _add_stall(states, stall, time)
        self._mark(states, barriers, time)
        count = bisect_right(self._ends, time)
        newest = self._completed[max(0, count - _MAX_FINISHED) : count]
        view = JobView(
            source=self._source,
            time=time,
            ranks=states.ranks(),
            stalls=tuple(
                replace(stall.view(), waits=True, awaited=_awaited(stall, time))
                for stall in reversed(stalls)
            ),
            in_progress=tuple(one for one in barriers if not one.abandoned),
            abandoned=tuple(one for one in barriers if one.abandoned),
            finished=tuple(self._barrier(one, one.end) for one in newest),
            more_finished=count - len(newest),
        )
        return view.with_headline(self._otherwise(time))

    def _mark(
        self, states: RankStates, barriers: list[BarrierView], time: float
    ) -> None:
        """Mark the ranks that the job has waited for before."""
        missing = {
            number: f"was missing at barrier {barrier.prefix}"
            for barrier in barriers
            if barrier.abandoned
            for number in barrier.missing_ranks
        }
        for stall, end in self._stalls:
            if end <= time:
                text = f"was awaited in {stall.last.phase}"
                missing |= dict.fromkeys(_ranks(stall.last.awaited_ranks), text)
        for number, text in missing.items():
            if rank := states.get("", number):
                states.note(rank, was_missing=True, doing=rank.doing or text)

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

    def _unfinished(self, time: float) -> Iterator[BarrierView]:
        """Yield the barriers that were given up, and those that are not complete."""
        ended = [one for one in self._incomplete if _end_of(one) <= time]
        for one in ended[-_MAX_ABANDONED:]:
            yield replace(self._barrier(one, one.end), abandoned=True)
        for one in (*self._incomplete, *self._completed):
            if one.start <= time < _end_of(one):
                reported = any(report.time <= time for report in one.reports)
                late = reported or time - one.start >= _AWAITED_AFTER
                barrier = self._barrier(one, time)
                yield replace(barrier, late=late and bool(barrier.missing))

    def _barrier(self, one: BarrierInstance, time: float) -> BarrierView:
        arrived = sorted(
            (one.start + delay, rank)
            for rank, delay in zip(one.ranks, one.delays, strict=True)
            if one.start + delay <= time
        )
        there = {rank for _, rank in arrived}
        complete = one.completed and time >= one.end
        missing = () if complete else tuple(self._missing(one, there))
        last = arrived[-1][0] if arrived else one.start
        return BarrierView(
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

    def _failures(self) -> list[FailureGroup]:
        """Return the first failure with a time, if there is one."""
        return [one for one in self.analysis.ended if one.failure.time][:1]

    def _otherwise(self, time: float) -> tuple[Level, str]:
        """Return how the job is if it waits for nothing."""
        for group in self._failures():
            failure, process = group.failure, group.failure.process
            if failure.time <= time:
                who = f"rank {process.rank}" if process.rank != NO_RANK else "a process"
                host = process.host or self.analysis.logged.host(process.rank)
                where = f" on {host}" if host else ""
                ago = duration(time - failure.time)
                text = f"first failure {ago} ago, {who}{where}: {failure.subject}"
                return "bad", f"{text}: {failure.error}"
        return "good", "the logs report no long wait and no failure up to here"


def _end_of(one: BarrierInstance) -> float:
    """Return when a barrier completed or was given up; inf if it was neither."""
    if one.completed:
        return one.end
    if one.outcome == WAITING and not one.continued:
        return inf
    return max(one.ends, default=one.end)


def _add_stall(states: RankStates, stall: LoggedStall, time: float) -> None:
    report = stall.last
    waited = time - stall.start
    doing = f"{report.phase}: {_awaited(stall, time)}"
    for text, state in (
        (report.waiting_ranks, RankState.WAITING),
        (report.awaited_ranks, awaited_state(report.cause)),
    ):
        for number in _ranks(text):
            if rank := states.get("", number):
                states.worsen(rank, state, doing, waited)


def _ranks(text: str) -> list[int]:
    with suppress(ValueError):  # a log may have any text
        return unfold(text, _MAX_RANKS)
    return []


def _awaited(stall: LoggedStall, time: float) -> str:
    """Return what the last report has about the awaited ranks, with ages of `time`."""
    later = time - stall.last.time

    def age(found: re.Match[str]) -> str:
        return f"{found[1]} for {max(0.0, int(found[2]) + later):.0f} s"

    return _AGE.sub(age, stall.last.awaited)


class ReplayApp(TopApp):
    """The screen of a finished job.

    Args:
        replay: The job.
        stats: What was read of its logs.
        folder: Where `e` and `r` write.
    """

    HAS_REPLAY_KEYS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause"),
        Binding("comma", "step(-1)"),
        Binding("full_stop", "step(1)"),
        Binding("less_than_sign", "speed(-1)"),
        Binding("greater_than_sign", "speed(1)"),
        Binding("n", "incident(1)"),
        Binding("p", "incident(-1)"),
        Binding("0", "restart"),
    ]

    def __init__(self, replay: Replay, stats: ReadStats, folder: Path) -> None:
        super().__init__(folder)
        self._replay = replay
        self._stats = stats
        self._time = replay.start
        self._playing = True
        wanted = (replay.end - replay.start) / _WHOLE
        self._speed = min(bisect_left(_SPEEDS, max(1.0, wanted)), len(_SPEEDS) - 1)
        self._drawn = time.monotonic()

    def on_mount(self) -> None:
        """Start to play."""
        self.set_interval(1 / _STEPS_A_SECOND, self._play)

    def _play(self) -> None:
        now = time.monotonic()
        passed, self._drawn = now - self._drawn, now
        if self._playing:
            self._go_to(self._time + passed * _SPEEDS[self._speed])

    def _go_to(self, moment: float) -> None:
        replay = self._replay
        self._time = min(replay.end, max(replay.start, moment))
        if self._time >= replay.end:
            self._playing = False
        self.draw()

    def shown_job(self) -> JobView:
        """Return the job at the current time."""
        return self._replay.view(self._time)

    def footer(self, width: int) -> TextRow:
        """Return the time bar: ``!`` where something went wrong."""
        message = super().footer(width)
        if message.text and message.spans[0].style == "notable":
            return message
        replay = self._replay
        whole = max(replay.end - replay.start, 1e-9)
        state = "playing" if self._playing else "paused"
        left = f"{state} x{_SPEEDS[self._speed]:g}  "
        right = f" {duration(self._time - replay.start)} of {duration(whole)}"
        right += "  Space , . n p ?"
        room = max(10, width - len(left) - len(right) - 2)
        cells = [" "] * room

        def cell(moment: float) -> int:
            return min(room - 1, int((moment - replay.start) / whole * (room - 1)))

        here = cell(self._time)
        cells[: here + 1] = ["="] * (here + 1)
        for moment in replay.incidents:
            cells[cell(moment)] = "!"
        cells[here] = ">" if self._playing else "|"
        bar = f"[{''.join(cells)}]"
        return row(
            Span(left, "heading"), Span(bar, "chart"), Span(shorten(pad(right, 0), 60))
        )

    def action_pause(self) -> None:
        """Pause, or go on; from the start at the end."""
        if self._time >= self._replay.end:
            self._time = self._replay.start
        self._playing = not self._playing
        self.draw()

    def action_step(self, steps: int) -> None:
        """Go a step back or on, and pause."""
        self._playing = False
        self._go_to(self._time + steps * max(0.1, _SPEEDS[self._speed]))

    def action_speed(self, steps: int) -> None:
        """Play slower or faster."""
        self._speed = min(len(_SPEEDS) - 1, max(0, self._speed + steps))
        self.draw()

    def action_incident(self, step: int) -> None:
        """Go to the next time at which something went wrong, or the one before."""
        moments = self._replay.incidents
        if step > 0:
            found = moments[bisect_right(moments, self._time) :][:1]
        else:
            found = moments[: bisect_left(moments, self._time)][-1:]
        self._playing = False
        if found:
            self._go_to(found[0])
        else:
            self.say("no further time at which something went wrong")

    def action_restart(self) -> None:
        """Play from the start."""
        self._time, self._playing = self._replay.start, True
        self.draw()

    def action_report(self) -> None:
        """Write the report of the logs."""
        self.save_later(lambda: page_files(self._replay.analysis, self._stats))
