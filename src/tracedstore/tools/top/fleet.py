"""The fleet as a grid: a line for each host, worst first, a character for each rank."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from tracedstore.common.text import duration
from tracedstore.tools.job_view import RankName, RankState, RankView, counts
from tracedstore.tools.top.rows import (
    Span,
    TextRow,
    fit,
    remaining,
    row,
    shorten,
    state_style,
    styled,
)

# One character each, so that the grid reads without colours.
GLYPHS: Final = {
    RankState.GONE: "X",
    RankState.STOPPED: "S",
    RankState.AWAITED: "A",
    RankState.NOT_STARTED: "-",
    RankState.NO_ANSWER: "?",
    RankState.WAITING: "w",
    RankState.RUNNING: ".",
}
# A rank of a replay that was missing before.
WAS_MISSING: Final = "!"
_MIN_CELLS = 8
_MAX_CELLS = 64
_LABEL = 18
_SUMMARY = 30
# States in which hosts are folded, if there is no room for all of them.
_FOLDED = (RankState.RUNNING, RankState.WAITING)
_RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
# Of a file: its name and the line are what tells.
_FOLDER = re.compile(r"^\S*/")
_NOT_STARTED, _NO_HOST = "(not started)", "(unknown host)"
_GIGABYTE = 1e9
# Columns of a screen with room for CPU time and memory.
_WIDE = 70


@dataclass(slots=True)
class FleetGrid:
    """The lines of the grid.

    Attributes:
        rows: The lines.
        ranks: The ranks in each line, from left to right.
        offset: The column of the first rank of a line.
    """

    rows: list[TextRow] = field(default_factory=list)
    ranks: list[list[RankView]] = field(default_factory=list)
    offset: int = 0

    def find(self, name: RankName | None) -> tuple[int, int] | None:
        """Return the line and the position of a rank; None if it is not shown."""
        for line, ranks in enumerate(self.ranks):
            for position, rank in enumerate(ranks):
                if rank.name == name:
                    return line, position
        return None


def glyph(rank: RankView) -> str:
    """Return the character of a rank."""
    return WAS_MISSING if _was_missing(rank) else GLYPHS[rank.state]


def _style(rank: RankView) -> str:
    return "notable" if _was_missing(rank) else state_style(rank.state)


def _was_missing(rank: RankView) -> bool:
    return rank.was_missing and rank.state is RankState.RUNNING


def matches(rank: RankView, pattern: str) -> bool:
    """Return whether a rank is selected: by host, number, range or state."""
    wanted = pattern.strip().lower()
    if not wanted:
        return True
    numbers = _RANKS.fullmatch(wanted.removeprefix("rank").strip())
    if numbers is not None:
        first = int(numbers[1])
        if first <= rank.rank <= int(numbers[2] or first):
            return True
    return wanted in rank.host.lower() or wanted == rank.state.label


def layout(
    ranks: Iterable[RankView],
    width: int,
    height: int,
    *,
    unfolded: Collection[RankState] = (),
    pattern: str = "",
) -> FleetGrid:
    """Arrange ranks in lines.

    Args:
        ranks: The ranks.
        width: The columns of the screen.
        height: Its lines. If all ranks fit, each has a line. If not even all hosts
            fit, the last of those whose ranks are all running, or all waiting, are one
            line.
        unfolded: States whose hosts are shown anyway.
        pattern: Only ranks that match it, see `matches`.
    """
    hosts = _by_host([rank for rank in ranks if matches(rank, pattern)])
    number = sum(len(members) for _, members in hosts)
    if 0 < number < height:
        return _table(hosts, width)
    label = min(_LABEL, max((len(host) for host, _ in hosts), default=0) + 1)
    longest = max((len(members) for _, members in hosts), default=0)
    room = min(_MAX_CELLS, width - label - 2 - _SUMMARY, longest)
    cells = max(_MIN_CELLS, room)
    lines = [-(-len(members) // cells) for _, members in hosts]
    states = [_uniform(members) for _, members in hosts]
    # Hosts that are well have the lines that the others, and the folds, leave free.
    foldable = {one for one in states if one in _FOLDED and one not in unfolded}
    taken = sum(
        n for n, state in zip(lines, states, strict=True) if state not in foldable
    )
    free = height - taken - len(foldable) if sum(lines) > height else sum(lines)
    fleet = FleetGrid(offset=label + 1)
    folded: dict[RankState, list[list[RankView]]] = {}
    for (host, members), number, state in zip(hosts, lines, states, strict=True):
        if state in foldable and number > free:
            folded.setdefault(state, []).append(members)
            continue
        free -= number * (state in foldable)
        _add_host(fleet, host, members, cells, label)
    for state in _FOLDED:
        if groups := folded.get(state):
            number = sum(map(len, groups))
            more = "more " if len(groups) < states.count(state) else ""
            text = f"{len(groups):,} {more}hosts, {number:,} ranks, all {state.label}"
            fleet.rows.append(
                row(
                    Span(GLYPHS[state] + " ", state_style(state)),
                    styled(text, state_style(state)),
                    styled("  (Enter shows them)", "dim"),
                    target=("fold", state),
                )
            )
            fleet.ranks.append([])
    return fleet


def _table(hosts: list[tuple[str, list[RankView]]], width: int) -> FleetGrid:
    """Return a line for each rank: what it is in, and what its process uses."""
    some = [rank for _, members in hosts for rank in members]
    digits = max(4, *(len(str(rank.rank)) for rank in some))
    label = min(_LABEL, max(4, *(len(host) for host, _ in hosts)))
    used = width >= _WIDE and any(rank.memory is not None for rank in some)
    heading = f"  {'rank':>{digits}} {fit('host', label)} {'for':>11} "
    heading += f"{'CPU':>5} {'memory':>7}  " if used else " "
    fleet = FleetGrid([row(Span(shorten(f"{heading}in", width), "dim"))], [[]])
    for host, members in hosts:
        for rank in members:
            waited = "" if rank.waited is None else duration(rank.waited)
            text = f"{rank.rank:>{digits}} {fit(host, label)} {waited:>11} "
            text += _used(rank) if used else " "
            fleet.rows.append(
                row(
                    Span(glyph(rank), _style(rank)),
                    Span(f" {text}"),
                    Span(shorten(_brief(rank), remaining(text, width - 2))),
                    target=("rank", rank.name),
                )
            )
            fleet.ranks.append([rank])
    return fleet


def _brief(rank: RankView) -> str:
    """Return what a rank is in, without what other columns have."""
    alive, _, place = rank.doing.partition(", in ")
    if place and alive.startswith("alive"):
        return f"in {_FOLDER.sub('', place)}"
    # Whom it waits for is in the headline.
    return rank.doing.partition(": waits for ")[0] or rank.state.label


def _used(rank: RankView) -> str:
    cpu = "" if rank.cpu is None else f"{rank.cpu:.0%}"
    return f"{cpu:>5} {bytes_text(rank.memory):>7}  "


def bytes_text(number: int | None) -> str:
    """Return ``312 MB``; "" if it is unknown."""
    if number is None:
        return ""
    return f"{number / 1e9:.1f} GB" if number >= _GIGABYTE else f"{number / 1e6:.0f} MB"


def _by_host(ranks: Iterable[RankView]) -> list[tuple[str, list[RankView]]]:
    hosts: dict[str, list[RankView]] = {}
    for rank in ranks:
        absent = _NOT_STARTED if rank.state is RankState.NOT_STARTED else _NO_HOST
        hosts.setdefault(rank.host or absent, []).append(rank)

    def badness(entry: tuple[str, list[RankView]]) -> tuple[object, ...]:
        states = Counter(rank.state for rank in entry[1])
        worst = min(states)
        return worst, -states[worst], entry[1][0].name

    return sorted(hosts.items(), key=badness)


def _uniform(ranks: list[RankView]) -> RankState | None:
    states = {rank.state for rank in ranks}
    return states.pop() if len(states) == 1 else None


def _add_host(
    fleet: FleetGrid, host: str, members: list[RankView], cells: int, label: int
) -> None:
    for start in range(0, len(members), cells):
        some = members[start : start + cells]
        grid = tuple(
            Span(glyph(rank), _style(rank), ("rank", rank.name)) for rank in some
        )
        name = Span(fit("" if start else host, label), "host")
        summary = Span(" " * (cells - len(some) + 2))
        text = "" if start else counts(members)
        # The worst state of the host.
        worst = state_style(min(rank.state for rank in members))
        fleet.rows.append(TextRow((name, Span(" "), *grid, summary, Span(text, worst))))
        fleet.ranks.append(some)


def legend(ranks: Iterable[RankView]) -> TextRow:
    """Return the number of ranks in each state, with its character."""
    states = Counter(rank.state for rank in ranks)
    spans: list[Span] = []
    for one in sorted(states):
        text = f"{GLYPHS[one]} {states[one]:,} {one.label}"
        spans += [Span(text, state_style(one)), Span("   ")]
    return TextRow(tuple(spans[:-1]))
