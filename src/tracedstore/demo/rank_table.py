"""The live view of the demo: its progress, and what each rank is doing."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tracedstore import names
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.coordination.ranges import fold
from tracedstore.demo.outputs import RankOutputs
from tracedstore.demo.rank import simulated_host
from tracedstore.terminal import escape

_BAR_WIDTH = 24
_LAST_MEMBER = BarrierKeys("").last_member
# Seconds. A shorter call counts as work, and would flicker; a longer one is notable.
_CALL_SECONDS, _LONG_CALL_SECONDS = 0.1, 1.0
# Heading, width, and whether it is a number.
_Column = tuple[str, int, bool]
_NOW: _Column = ("now", 30, False)
_BY_RANK: Sequence[_Column] = (
    ("rank", 4, True),
    ("host", 11, False),
    _NOW,
    ("calls", 5, True),
    ("CAS lost", 8, True),
    ("was last", 8, True),
)
_BY_STATE: Sequence[_Column] = (("ranks", 5, True), _NOW, ("which", 40, False))
_GAP = 2
# These are always shown; the last of them is narrower on a narrow terminal.
_MIN_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank is doing.

    Attributes:
        activity: The same text for all ranks in this state.
        style: The style of its row.
        detail: The text for one rank, with the duration; "" for the same text.
    """

    activity: str
    style: str = "dim"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the demo is.

    Attributes:
        number: The number of the scenario, from 1 on; 0 before the first.
        total: The number of scenarios.
        title: The title of the scenario.
        fraction: The finished part of the scenario, from 0 to 1.
        seconds: Seconds since the start of the demo.
    """

    number: int
    total: int
    title: str
    fraction: float
    seconds: float

    def __rich__(self) -> Table:
        """Return a progress bar with its text."""
        done = max(0, self.number - 1) + self.fraction if self.number else 0.0
        numbered = f"Scenario {self.number} of {self.total}: " if self.number else ""
        text = f"{numbered}{self.title}, {self.seconds:.0f} s"
        bar = ProgressBar(
            total=self.total, completed=done, width=_BAR_WIDTH, complete_style="green"
        )
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar, Text(text, "bold", no_wrap=True, overflow="crop"))
        return grid


def live_view(
    progress: Progress, outputs: RankOutputs, width: int, height: int
) -> RenderableType:
    """Return the view for a terminal of some size.

    If there are more ranks than rows, they are grouped by what they are doing. On a
    narrow terminal the last columns are left out.
    """
    # One line each for the blank line, the progress, the headings and the cursor.
    rows = max(1, height - 4)
    states = {rank: rank_state(outputs, rank) for rank in outputs.metrics}
    if len(states) <= rows:
        table = _rank_table(outputs, states, width)
    else:
        table = _state_table(states, rows, width)
    return Group(Text(""), progress, table)


def _rank_table(
    outputs: RankOutputs, states: dict[int, RankState], width: int
) -> Table:
    cells = []
    for rank, state in states.items():
        metrics = outputs.metrics[rank]
        cells.append(
            (
                state.style,
                str(rank),
                simulated_host(rank),
                state.detail or state.activity,
                str(metrics.calls),
                str(metrics.cas[names.LOST]),
                str(metrics.last_arrivals),
            )
        )
    return _table(_BY_RANK, cells, width)


def _state_table(states: dict[int, RankState], rows: int, width: int) -> Table:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, state in states.items():
        groups.setdefault((state.activity, state.style), []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    cells = [
        (style, str(len(ranks)), activity, fold(ranks))
        for (activity, style), ranks in ordered
    ]
    if len(cells) > rows:
        hidden = len(cells) - rows + 1
        cells[rows - 1 :] = [("dim", "...", f"and {hidden} more", "")]
    return _table(_BY_STATE, cells, width)


def _table(
    columns: Sequence[_Column], rows: Sequence[tuple[str, ...]], width: int
) -> Table:
    """Make a table of the columns that fit; each row has its style first."""
    # Padding on the right only: releases of rich differ in that of an edge.
    table = Table(box=None, padding=(0, _GAP, 0, 0))
    free = width
    for heading, column_width, is_number in columns:
        if len(table.columns) >= _MIN_COLUMNS and column_width + _GAP > free:
            break
        shown = min(column_width, max(free - _GAP, 1))
        free -= shown + _GAP
        table.add_column(
            heading,
            width=shown,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="crop",
        )
    for style, *cells in rows:
        texts = [Text(escape(cell)) for cell in cells[: len(table.columns)]]
        table.add_row(*texts, style=style)
    return table


def rank_state(outputs: RankOutputs, rank: int) -> RankState:
    """Return what a rank was doing when it was last queried."""
    status = outputs.statuses[rank]
    if status is None:
        started = outputs.has_started(rank)
        return RankState("no answer", "red") if started else RankState("starting")
    # A rank of the demo has one thread that calls the store.
    call = status.calls[0] if status.calls else None
    if call is None or call.waited_seconds < _CALL_SECONDS:
        return RankState("working")
    seconds = f"{call.waited_seconds:.1f} s"
    style = "dim" if call.waited_seconds < _LONG_CALL_SECONDS else "yellow"
    if call.operation == "wait" and call.key.endswith(_LAST_MEMBER):
        at = f"at {call.key.removesuffix(_LAST_MEMBER)}"
        return RankState(f"waiting {at}", style, f"waiting {seconds} {at}")
    activity = f"in {call.operation}"
    return RankState(activity, style, f"{activity} for {seconds}")
