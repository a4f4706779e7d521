"""The axes of the arrival plot."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from tracedstore.common.text import clock_time, duration
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.drawing import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    RIGHT,
    TOP,
    WIDTH,
    SvgLabel,
    SvgPath,
    label,
)

MAX_TIME_LABELS: Final = 6
_MAX_RANK_LABELS = 12
# Pixels between the margin of the plotted area and the first and last arrival.
_PADDING = 8
_DECADES = 5
# Top of the smallest scale, as a power of ten: 10 ms. Its bottom is 0.1 µs.
_MIN_TOP = -2
_NEVER_HEIGHT = 22


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
            return LEFT + PLOT_WIDTH / 2
        share = (time - self._begin) / self._seconds
        return LEFT + _PADDING + share * (PLOT_WIDTH - 2 * _PADDING)

    def labels(self, height: int) -> Iterable[SvgLabel]:
        """Yield times of day."""
        y = height - BOTTOM + 20
        if self._seconds <= 0:
            yield label(self._position(0.0), y, clock_time(self._begin), "middle")
            return
        count = MAX_TIME_LABELS if self._seconds > MAX_TIME_LABELS else 2
        for tick in range(count):
            time = self._begin + tick / (count - 1) * self._seconds
            anchor = {0: "start", count - 1: "end"}.get(tick, "middle")
            yield label(self._position(time), y, clock_time(time), anchor)


class RankAxis:
    """A horizontal axis of ranks, for logs with a single barrier."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._step = PLOT_WIDTH / len(ranks)
        self._positions = {rank: index for index, rank in enumerate(ranks)}

    def x(self, _barrier: BarrierInstance, rank: int) -> float:
        """Return the position of a rank."""
        return LEFT + (self._positions[rank] + 0.5) * self._step

    def labels(self, height: int) -> Iterable[SvgLabel]:
        """Yield some of the ranks."""
        step = math.ceil(len(self._ranks) / _MAX_RANK_LABELS)
        for index in range(0, len(self._ranks), step):
            x = LEFT + (index + 0.5) * self._step
            text = f"rank {self._ranks[index]}"
            yield label(x, height - BOTTOM + 20, text, "middle")


class DelayAxis:
    """A vertical logarithmic axis of seconds after the first arrival.

    Smaller delays are drawn at the bottom.

    Attributes:
        never_y: Position of missing ranks, above the scale.
    """

    never_y = TOP

    def __init__(self, max_delay: float, height: int, *, never: bool) -> None:
        self._top = math.ceil(math.log10(max(max_delay, 10.0**_MIN_TOP)))
        self._bottom = self._top - _DECADES
        self._never = never
        self._above = TOP + (_NEVER_HEIGHT if never else 0)
        self._height = height - self._above - BOTTOM

    def y(self, delay: float) -> float:
        """Return the position of a delay."""
        power = math.log10(delay) if delay > 0 else self._bottom
        share = (max(power, self._bottom) - self._bottom) / _DECADES
        return self._above + (1 - share) * self._height

    def labels(self) -> Iterable[SvgLabel]:
        """Yield a label for each power of ten."""
        if self._never:
            yield label(LEFT - 8, self.never_y + 4, "never", "end")
        for power in range(self._bottom, self._top + 1):
            text = "first" if power == self._bottom else duration(10.0**power)
            yield label(LEFT - 8, self.y(10.0**power) + 4, text, "end")

    def grid(self) -> Iterable[SvgPath]:
        """Yield a line for each power of ten."""
        for power in range(self._bottom, self._top + 1):
            y = self.y(10.0**power)
            yield SvgPath("grid", f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}")
