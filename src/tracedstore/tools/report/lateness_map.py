"""Plots which ranks were late at which barriers, as a map of a bounded size."""

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from tracedstore.common.text import clock_time, duration
from tracedstore.tools.report.analysis import Analysis
from tracedstore.tools.report.axes import MAX_TIME_LABELS
from tracedstore.tools.report.drawing import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    TOP,
    Plot,
    SvgLabel,
    SvgPath,
    label,
)

_MAX_COLUMNS = 200
_MAX_ROWS = 100
_MAX_RANK_LABELS = 12
_MAX_CELL_WIDTH = 64
_TIME_LABEL_WIDTH = 64
# Seconds. The shades are shares of the largest lag, or of this if all lags are smaller.
_MIN_SCALE = 0.1
# Shares of the scale from which each shade is used.
_SHADES = (0.05, 0.15, 0.35, 0.7)
_MISSING = len(_SHADES) + 1


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
    cell_width = min(PLOT_WIDTH / cells.columns, _MAX_CELL_WIDTH)
    height = int(TOP + cells.rows * cell_height + BOTTOM)
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
                x, y = LEFT + column * cell_width, TOP + row * cell_height
                paths.setdefault(shade, []).append(
                    f"M{x:.1f} {y:.1f}h{(end - column) * cell_width:.1f}"
                    f"v{cell_height:.1f}H{x:.1f}z"
                )
            column = end
    return paths


def _rank_labels(cells: _Cells, cell_height: float) -> Iterable[SvgLabel]:
    for row in range(0, cells.rows, math.ceil(cells.rows / _MAX_RANK_LABELS)):
        rank = cells.ranks[math.ceil(row * len(cells.ranks) / cells.rows)]
        y = TOP + (row + 0.5) * cell_height + 4
        yield label(LEFT - 8, y, f"rank {rank}", "end")


def _time_labels(
    analysis: Analysis, cells: _Cells, cell_width: float, height: int
) -> Iterable[SvgLabel]:
    barriers, columns = analysis.barriers, cells.columns
    step = math.ceil(max(_TIME_LABEL_WIDTH / cell_width, columns / MAX_TIME_LABELS))
    previous = ""
    for column in range(0, columns, step):
        x = LEFT + column * cell_width
        text = clock_time(barriers[math.ceil(column * len(barriers) / columns)].end)
        fits = column == 0 or x + _TIME_LABEL_WIDTH <= LEFT + PLOT_WIDTH
        if text != previous and fits:
            yield label(x, height - BOTTOM + 18, text, "start")
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
