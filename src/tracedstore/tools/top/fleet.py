"""The fleet as a grid: a line for each host, worst first, a character for each rank."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from tracedstore.tools.job_view import RankName, RankState, RankView
from tracedstore.tools.top.rows import Span, TextRow, fit, row, state_style, styled

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
_MIN_CELLS = 8
_MAX_CELLS = 64
_LABEL = 18
_SUMMARY = 30
# States in which hosts are folded, if there is no room for all of them.
_FOLDED = (RankState.RUNNING, RankState.WAITING)
_RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
_NO_HOST = "(not started)"


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
        height: Its lines. If there are more, hosts whose ranks are all running, or all
            waiting, are one line.
        unfolded: States whose hosts are shown anyway.
        pattern: Only ranks that match it, see `matches`.
    """
    hosts = _by_host([rank for rank in ranks if matches(rank, pattern)])
    label = min(_LABEL, max((len(host) for host, _ in hosts), default=0) + 1)
    longest = max((len(members) for _, members in hosts), default=0)
    room = min(_MAX_CELLS, width - label - 2 - _SUMMARY, longest)
    cells = max(_MIN_CELLS, room)
    lines = sum(-(-len(members) // cells) for _, members in hosts)
    fleet = FleetGrid(offset=label + 1)
    folded: dict[RankState, list[list[RankView]]] = {}
    for host, members in hosts:
        state = _uniform(members)
        if lines > height and state in _FOLDED and state not in unfolded:
            folded.setdefault(state, []).append(members)
        else:
            _add_host(fleet, host, members, cells, label)
    for state in _FOLDED:
        if groups := folded.get(state):
            number = sum(map(len, groups))
            text = f"{len(groups):,} hosts, {number:,} ranks, all {state.label}"
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


def _by_host(ranks: Iterable[RankView]) -> list[tuple[str, list[RankView]]]:
    hosts: dict[str, list[RankView]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host or _NO_HOST, []).append(rank)

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
            Span(GLYPHS[rank.state], state_style(rank.state), ("rank", rank.name))
            for rank in some
        )
        name = Span(fit("" if start else host, label), "host")
        summary = Span(" " * (cells - len(some) + 2))
        text = "" if start else counts(members)
        # The worst state of the host.
        worst = state_style(min(rank.state for rank in members))
        fleet.rows.append(TextRow((name, Span(" "), *grid, summary, Span(text, worst))))
        fleet.ranks.append(some)


def counts(ranks: Iterable[RankView]) -> str:
    """Return how many ranks are in which state, the worst first."""
    states = Counter(rank.state for rank in ranks)
    return ", ".join(f"{states[one]:,} {one.label}" for one in sorted(states))


def legend(ranks: Iterable[RankView]) -> TextRow:
    """Return the number of ranks in each state, with its character."""
    states = Counter(rank.state for rank in ranks)
    spans: list[Span] = []
    for one in sorted(states):
        text = f"{GLYPHS[one]} {states[one]:,} {one.label}"
        spans += [Span(text, state_style(one)), Span("   ")]
    return TextRow(tuple(spans[:-1]))
