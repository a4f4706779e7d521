"""Plots arrivals at barriers, as shapes in the coordinates of an SVG image.

The arrival plot has the delay of each rank over time, or over the ranks if there is one
barrier. The lateness map has a row for each rank and a column for each barrier. The
number of shapes is bounded in both.
"""

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import clock_time, duration
from tracedstore.tools.report.analysis import Analysis, Incident
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.logged_events import FAILED, TIMEOUT, WAITING

# Size of the image, and the margins around the plotted area.
_WIDTH = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 14, 34
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT

# The axes.
_MAX_TIME_LABELS = 6
_MAX_RANK_LABELS = 12
# Pixels between the margin of the plotted area and the first and last arrival.
_PADDING = 8
_DECADES = 5
# Top of the smallest scale, as a power of ten: 10 ms. Its bottom is 0.1 µs.
_MIN_TOP = -2
_NEVER_HEIGHT = 22

# The arrival plot. The map has as many columns, too.
_ARRIVALS_HEIGHT = 320
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

# The lateness map.
_MAX_ROWS = 100
_MAX_CELL_WIDTH = 64
_TIME_LABEL_WIDTH = 64
# Seconds. The shades are shares of the largest lag, or of this if all lags are smaller.
_MIN_SCALE = 0.1
# Shares of the scale from which each shade is used.
_SHADES = (0.05, 0.15, 0.35, 0.7)
_MISSING = len(_SHADES) + 1


class SvgPath(NamedTuple):
    """A path with its commands, its CSS class and its tooltip."""

    css_class: str
    commands: str
    title: str = ""


class SvgDot(NamedTuple):
    """A circle with its CSS class and its tooltip."""

    css_class: str
    x: str
    y: str
    title: str


class SvgLabel(NamedTuple):
    """A text; ``anchor`` is SVG's ``text-anchor``."""

    x: str
    y: str
    anchor: str
    text: str


@dataclass(slots=True)
class Plot:
    """An image, drawn in the order of the attributes.

    Attributes:
        id: Id of the SVG element.
        label: Description for screen readers.
        height: Height of the image.
        background: Grid and areas.
        dots: Single arrivals.
        marks: Barriers that did not complete, and missing ranks.
        labels: Labels of the axes.
        legend: Text by CSS class.
        width: Width of the image.
    """

    id: str
    label: str
    height: int
    background: list[SvgPath] = field(default_factory=list)
    dots: list[SvgDot] = field(default_factory=list)
    marks: list[SvgPath] = field(default_factory=list)
    labels: list[SvgLabel] = field(default_factory=list)
    legend: Mapping[str, str] = field(default_factory=dict)
    width: int = _WIDTH


def _label(x: float, y: float, text: str, anchor: str) -> SvgLabel:
    """Create a label with rounded coordinates."""
    return SvgLabel(f"{x:.1f}", f"{y:.1f}", anchor, text)


class TimeAxis:
    """A horizontal axis of the ends of barriers."""

    def __init__(self, barriers: Sequence[BarrierInstance]) -> None:
        ends = [barrier.end for barrier in barriers]
        self._begin = min(ends)
        self._seconds = max(ends) - self._begin

    def x(self, barrier: BarrierInstance, _rank: int = 0) -> float:
        """Return the position of a barrier; it is the same for all ranks."""
        return self._position(barrier.end)

    def _position(self, time: float) -> float:
        if self._seconds <= 0:
            return _LEFT + _PLOT_WIDTH / 2
        share = (time - self._begin) / self._seconds
        return _LEFT + _PADDING + share * (_PLOT_WIDTH - 2 * _PADDING)

    def labels(self, height: int) -> Iterable[SvgLabel]:
        """Yield times of day."""
        y = height - _BOTTOM + 20
        if self._seconds <= 0:
            yield _label(self._position(0.0), y, clock_time(self._begin), "middle")
            return
        count = _MAX_TIME_LABELS if self._seconds > _MAX_TIME_LABELS else 2
        for tick in range(count):
            time = self._begin + tick / (count - 1) * self._seconds
            anchor = {0: "start", count - 1: "end"}.get(tick, "middle")
            yield _label(self._position(time), y, clock_time(time), anchor)


class RankAxis:
    """A horizontal axis of ranks, for logs with a single barrier."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._step = _PLOT_WIDTH / len(ranks)
        self._positions = {rank: index for index, rank in enumerate(ranks)}

    def x(self, _barrier: BarrierInstance, rank: int) -> float:
        """Return the position of a rank."""
        return _LEFT + (self._positions[rank] + 0.5) * self._step

    def labels(self, height: int) -> Iterable[SvgLabel]:
        """Yield some of the ranks."""
        step = math.ceil(len(self._ranks) / _MAX_RANK_LABELS)
        for index in range(0, len(self._ranks), step):
            x = _LEFT + (index + 0.5) * self._step
            text = f"rank {self._ranks[index]}"
            yield _label(x, height - _BOTTOM + 20, text, "middle")


class DelayAxis:
    """A vertical logarithmic axis of seconds after the first arrival.

    Smaller delays are drawn at the bottom.

    Attributes:
        never_y: Position of missing ranks, above the scale.
    """

    never_y = _TOP

    def __init__(self, max_delay: float, height: int, *, never: bool) -> None:
        self._top = math.ceil(math.log10(max(max_delay, 10.0**_MIN_TOP)))
        self._bottom = self._top - _DECADES
        self._never = never
        self._above = _TOP + (_NEVER_HEIGHT if never else 0)
        self._height = height - self._above - _BOTTOM

    def y(self, delay: float) -> float:
        """Return the position of a delay."""
        power = math.log10(delay) if delay > 0 else self._bottom
        share = (max(power, self._bottom) - self._bottom) / _DECADES
        return self._above + (1 - share) * self._height

    def labels(self) -> Iterable[SvgLabel]:
        """Yield a label for each power of ten."""
        if self._never:
            yield _label(_LEFT - 8, self.never_y + 4, "never", "end")
        for power in range(self._bottom, self._top + 1):
            text = "first" if power == self._bottom else duration(10.0**power)
            yield _label(_LEFT - 8, self.y(10.0**power) + 4, text, "end")

    def grid(self) -> Iterable[SvgPath]:
        """Yield a line for each power of ten."""
        for power in range(self._bottom, self._top + 1):
            y = self.y(10.0**power)
            yield SvgPath("grid", f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}")


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
    y_axis = DelayAxis(max_delay, _ARRIVALS_HEIGHT, never=bool(incidents))
    plot = Plot("arrivals", "Arrivals at barriers over time", _ARRIVALS_HEIGHT)
    plot.labels += [*y_axis.labels(), *x_axis.labels(_ARRIVALS_HEIGHT)]
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
    host = analysis.logged.host(rank)
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
            share = (x_axis.x(barrier) - _LEFT) / _PLOT_WIDTH
            column = min(int(share * _MAX_COLUMNS), _MAX_COLUMNS - 1)
            columns.setdefault(column, []).append(barrier)
    step = _PLOT_WIDTH / _MAX_COLUMNS
    bottom = y_axis.y(0.0)
    bars, halves = [], []
    for column, members in sorted(columns.items()):
        x = _LEFT + column * step
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
        f"M{x_axis.x(barrier):.1f} {_TOP}V{_ARRIVALS_HEIGHT - _BOTTOM}",
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


@dataclass(slots=True)
class _Cells:
    """The shades of the map by row and column.

    Attributes:
        rows: Number of rows.
        columns: Number of columns.
        ranks: Ranks, evenly spread over the rows.
        scale: The lag, in seconds, that the shades are shares of.
        shades: 0 for a rank on time, the highest for a missing one. A cell without
            arrivals has none.
    """

    rows: int
    columns: int
    ranks: list[int]
    scale: float
    shades: dict[tuple[int, int], int]


def lateness_map(analysis: Analysis) -> Plot:
    """Plot the lag of ranks: a row for each rank, a column for each barrier.

    Several ranks or barriers share a row or a column if there are too many. The cell
    then shows the worst of them.
    """
    cells = _cells(analysis)
    cell_height = min(18.0, max(3.4, 360 / cells.rows))
    cell_width = min(_PLOT_WIDTH / cells.columns, _MAX_CELL_WIDTH)
    height = int(_TOP + cells.rows * cell_height + _BOTTOM)
    paths = _rectangles(cells, cell_width, cell_height)
    texts = [
        "on time",
        *(f"{duration(share * cells.scale)} or more behind" for share in _SHADES),
        "missing",
    ]
    return Plot(
        "lateness",
        "Late ranks by rank and barrier",
        height,
        background=[
            SvgPath(f"shade{shade}", "".join(commands))
            for shade, commands in sorted(paths.items())
        ],
        labels=[
            *_rank_labels(cells, cell_height),
            *_time_labels(analysis, cells, cell_width, height),
        ],
        legend={f"key{shade}": texts[shade] for shade in sorted(paths)},
    )


def _cells(analysis: Analysis) -> _Cells:
    barriers, ranks = analysis.barriers, analysis.known_ranks
    rows, columns = min(len(ranks), _MAX_ROWS), min(len(barriers), _MAX_COLUMNS)
    row_of = {rank: index * rows // len(ranks) for index, rank in enumerate(ranks)}
    column_of = {
        id(barrier): index * columns // len(barriers)
        for index, barrier in enumerate(barriers)
    }
    scale = max(
        _MIN_SCALE, *(barrier.spread - barrier.median_delay for barrier in barriers)
    )
    thresholds = [share * scale for share in _SHADES]
    shades: dict[tuple[int, int], int] = {}
    for barrier in barriers:
        column, median_delay = column_of[id(barrier)], barrier.median_delay
        for rank, delay in zip(barrier.ranks, barrier.delays, strict=True):
            if rank in row_of:
                cell = row_of[rank], column
                shade = bisect(thresholds, delay - median_delay)
                shades[cell] = max(shade, shades.get(cell, 0))
    for incident in analysis.incidents:
        column = column_of[id(incident.barrier)]
        for rank in incident.missing:
            shades[row_of[rank], column] = _MISSING
    return _Cells(rows, columns, ranks, scale, shades)


def _rectangles(
    cells: _Cells, cell_width: float, cell_height: float
) -> dict[int, list[str]]:
    """Return path commands by shade. Neighbours of one shade are one rectangle."""
    paths: dict[int, list[str]] = {}
    for row in range(cells.rows):
        column = 0
        while column < cells.columns:
            shade = cells.shades.get((row, column))
            end = column + 1
            while end < cells.columns and cells.shades.get((row, end)) == shade:
                end += 1
            if shade is not None:
                x, y = _LEFT + column * cell_width, _TOP + row * cell_height
                paths.setdefault(shade, []).append(
                    f"M{x:.1f} {y:.1f}h{(end - column) * cell_width:.1f}"
                    f"v{cell_height:.1f}H{x:.1f}z"
                )
            column = end
    return paths


def _rank_labels(cells: _Cells, cell_height: float) -> Iterable[SvgLabel]:
    for row in range(0, cells.rows, math.ceil(cells.rows / _MAX_RANK_LABELS)):
        rank = cells.ranks[math.ceil(row * len(cells.ranks) / cells.rows)]
        y = _TOP + (row + 0.5) * cell_height + 4
        yield _label(_LEFT - 8, y, f"rank {rank}", "end")


def _time_labels(
    analysis: Analysis, cells: _Cells, cell_width: float, height: int
) -> Iterable[SvgLabel]:
    barriers, columns = analysis.barriers, cells.columns
    step = math.ceil(max(_TIME_LABEL_WIDTH / cell_width, columns / _MAX_TIME_LABELS))
    previous = ""
    for column in range(0, columns, step):
        x = _LEFT + column * cell_width
        text = clock_time(barriers[math.ceil(column * len(barriers) / columns)].end)
        fits = column == 0 or x + _TIME_LABEL_WIDTH <= _LEFT + _PLOT_WIDTH
        if text != previous and fits:
            yield _label(x, height - _BOTTOM + 18, text, "start")
            previous = text


def map_note(analysis: Analysis) -> str:
    """Return a sentence on how many ranks and barriers share a cell, or ""."""
    rank_count, barrier_count = len(analysis.ranks), len(analysis.barriers)
    parts = []
    if rank_count > _MAX_ROWS:
        parts.append(f"a row is {math.ceil(rank_count / _MAX_ROWS)} ranks")
    if barrier_count > _MAX_COLUMNS:
        parts.append(f"a column is {math.ceil(barrier_count / _MAX_COLUMNS)} barriers")
    if not parts:
        return ""
    return f"Here {' and '.join(parts)}; a cell shows the latest arrival."
