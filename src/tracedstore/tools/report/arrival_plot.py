"""Plots the arrivals of ranks over time. The number of shapes is bounded."""

from collections.abc import Iterable, Sequence
from statistics import median

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import clock_time, duration
from tracedstore.tools.report.analysis import Analysis, Incident
from tracedstore.tools.report.axes import DelayAxis, RankAxis, TimeAxis
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.drawing import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    TOP,
    Plot,
    SvgDot,
    SvgPath,
)
from tracedstore.tools.report.record_types import FAILED, TIMEOUT, WAITING

_HEIGHT = 320
_MAX_DOTS = 3000
_MAX_OUTLIERS = 60
_MAX_COLUMNS = 200
_MAX_MARKS = 200
_OUTCOMES = {
    WAITING: "has no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}
_DOTS_LEGEND = {
    "dot": "arrival",
    "dot last": "last arrival",
    "bad-line": "barrier that did not complete",
    "cross": "missing rank",
}
_BAND_LEGEND = {
    "band": "from the first to the last arrival",
    "half": "half of the ranks had arrived",
    "dot last": "last arrival, at the barriers where it was latest",
    "bad-line": "barrier that did not complete",
    "cross": "missing rank",
}


def arrival_plot(analysis: Analysis) -> Plot:
    """Plot the delay of each arrival after the first one, over the time of the job.

    Up to 3,000 arrivals are drawn as dots. More are drawn as a band of the first, half
    and last arrivals, with dots for the latest ones. A single barrier is plotted over
    its ranks.
    """
    barriers = analysis.barriers
    with_dots = sum(len(barrier.ranks) for barrier in barriers) <= _MAX_DOTS
    incidents = [each for each in analysis.incidents if each.missing][:_MAX_MARKS]
    time_axis = TimeAxis(barriers)
    over_ranks = with_dots and len(barriers) == 1
    x_axis = RankAxis(analysis.known_ranks) if over_ranks else time_axis
    max_delay = max(barrier.spread for barrier in barriers)
    y_axis = DelayAxis(max_delay, _HEIGHT, never=bool(incidents))
    plot = Plot("arrivals", "Arrivals at barriers over time", _HEIGHT)
    plot.labels += [*y_axis.labels(), *x_axis.labels(_HEIGHT)]
    plot.background += y_axis.grid()
    if with_dots:
        for barrier in barriers:
            for index in range(len(barrier.ranks)):
                plot.dots.append(_dot(analysis, barrier, index, x_axis, y_axis))
    else:
        plot.background += _band(barriers, time_axis, y_axis)
        latest = sorted(barriers, key=lambda barrier: -barrier.spread)[:_MAX_OUTLIERS]
        for barrier in latest:
            if barrier.delays:
                index = barrier.delays.index(barrier.spread)
                plot.dots.append(_dot(analysis, barrier, index, x_axis, y_axis))
    if not over_ranks:
        unfinished = [barrier for barrier in barriers if not barrier.completed]
        plot.marks += (_line(each, time_axis) for each in unfinished[:_MAX_MARKS])
    for incident in incidents:
        plot.marks += _crosses(incident, x_axis, y_axis)
    drawn = {path.css_class for path in (*plot.background, *plot.marks)}
    drawn |= {dot.css_class for dot in plot.dots}
    legend = _DOTS_LEGEND if with_dots else _BAND_LEGEND
    plot.legend = {
        f"key-{css_class.replace(' ', '-')}": text
        for css_class, text in legend.items()
        if css_class in drawn
    }
    return plot


def _dot(
    analysis: Analysis,
    barrier: BarrierInstance,
    index: int,
    x_axis: TimeAxis | RankAxis,
    y_axis: DelayAxis,
) -> SvgDot:
    rank, delay = barrier.ranks[index], barrier.delays[index]
    host = analysis.records.host(rank)
    return SvgDot(
        css_class="dot last" if rank == barrier.last_rank else "dot",
        x=f"{x_axis.x(barrier, rank):.1f}",
        y=f"{y_axis.y(delay):.1f}",
        title=(
            f"rank {rank}{f' on {host}' if host else ''}: {duration(delay)} after the"
            f" first rank at {barrier.id.prefix}, {clock_time(barrier.end)}"
        ),
    )


def _band(
    barriers: Sequence[BarrierInstance], x_axis: TimeAxis, y_axis: DelayAxis
) -> Iterable[SvgPath]:
    columns: dict[int, list[BarrierInstance]] = {}
    for barrier in barriers:
        if barrier.ranks:
            share = (x_axis.x(barrier) - LEFT) / PLOT_WIDTH
            column = min(int(share * _MAX_COLUMNS), _MAX_COLUMNS - 1)
            columns.setdefault(column, []).append(barrier)
    step = PLOT_WIDTH / _MAX_COLUMNS
    bottom = y_axis.y(0.0)
    bars, halves = [], []
    for column, members in sorted(columns.items()):
        x = LEFT + column * step
        top = y_axis.y(max(barrier.spread for barrier in members))
        half = y_axis.y(median(barrier.median_delay for barrier in members))
        bars.append(f"M{x:.1f} {bottom:.1f}V{top:.1f}h{step:.2f}V{bottom:.1f}z")
        halves.append(f"M{x:.1f} {half:.1f}h{step:.2f}")
    yield SvgPath("band", "".join(bars))
    yield SvgPath("half", "".join(halves))


def _line(barrier: BarrierInstance, x_axis: TimeAxis) -> SvgPath:
    """Mark a barrier that did not complete."""
    return SvgPath(
        "bad-line",
        f"M{x_axis.x(barrier):.1f} {TOP}V{_HEIGHT - BOTTOM}",
        f"{barrier.id.prefix} {_OUTCOMES[barrier.outcome]} at"
        f" {clock_time(barrier.end)}",
    )


def _crosses(
    incident: Incident, x_axis: TimeAxis | RankAxis, y_axis: DelayAxis
) -> Iterable[SvgPath]:
    """Mark the missing ranks; those at the same position get one mark."""
    barrier = incident.barrier
    by_position: dict[float, list[int]] = {}
    for rank in incident.missing:
        by_position.setdefault(x_axis.x(barrier, rank), []).append(rank)
    verb = "never arrived" if barrier.outcome == TIMEOUT else "had not arrived"
    for x, missing in list(by_position.items())[:_MAX_MARKS]:
        yield SvgPath(
            "cross",
            f"M{x - 5:.1f} {y_axis.never_y - 5}l10 10m0 -10l-10 10",
            f"{ranks_text(missing)} {verb} at {barrier.id.prefix}",
        )
