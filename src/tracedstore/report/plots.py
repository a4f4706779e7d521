"""Arrivals as pictures: SVG of a bounded size, however many ranks and barriers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from tracedstore.report.analysis import Analysis, Incident
from tracedstore.report.barriers import Round
from tracedstore.report.formatting import clock_time, duration, ranks, safe
from tracedstore.report.records import FAILED, TIMEOUT, WAITING

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 74, 14, 14, 34
_MOST_DOTS = 3000
_MOST_OUTLIERS = 60
_MOST_COLUMNS = 200
_MOST_ROWS = 100
_MOST_MARKS = 200
_DECADES = 5
_LOWEST = -2
_NEVER_HEIGHT = 22
_TICKS = 6
# Of a time, and of a column.
_LABEL, _WIDEST = 64, 64
# Seconds; who is behind by less than some share of it is with the others.
_LEAST_LATE = 0.1
_ENDINGS = {
    WAITING: "has no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}
_WITH_DOTS = {
    "dot": "an arrival",
    "dot last": "the last one",
    "bad-line": "a barrier that did not complete",
    "cross": "never came",
}
_WITH_BAND = {
    "band": "from the first arrival to the last",
    "half": "half of the ranks were there",
    "dot last": "the last one, where it came latest",
    "bad-line": "a barrier that did not complete",
    "cross": "never came",
}
# Of the latest arrival, from which each shade of the map begins.
_SHADES = (0.05, 0.15, 0.35, 0.7)


def arrivals(analysis: Analysis) -> str:
    """Draw when ranks came, after the first one, over the time of the job.

    A dot an arrival, or, where these would be too many, the first, half and last of
    the ranks, and dots for those that kept the others waiting for longest. A job with
    one barrier has its ranks side by side.
    """
    rounds = analysis.rounds
    height = 320
    total = sum(len(each.ranks) for each in rounds)
    missed = [each for each in analysis.incidents if each.missing][:_MOST_MARKS]
    across: _Across
    alone = len(rounds) == 1 and total <= _MOST_DOTS
    if alone:
        across = _AcrossRanks(known_ranks(analysis))
    else:
        across = _Across(*_bounds(each.end for each in rounds))
    up = _Up(max(each.spread for each in rounds), height, never=bool(missed))
    parts = [*up.axis(), *across.axis(height)]
    if total <= _MOST_DOTS:
        for each in rounds:
            parts += _dots(analysis, each, across, up, range(len(each.ranks)))
    else:
        parts += _band(rounds, across, up)
        worst = sorted(rounds, key=lambda each: -each.spread)[:_MOST_OUTLIERS]
        for each in worst:
            latest = max(range(len(each.late)), key=each.late.__getitem__, default=None)
            if latest is not None:
                parts += _dots(analysis, each, across, up, [latest])
    troubled = [each for each in rounds if not each.completed and not alone]
    for each in troubled[:_MOST_MARKS]:
        x = across.when(each.end)
        said = f"{each.barrier.prefix} {_ENDINGS[each.kind]} at {clock_time(each.end)}"
        parts.append(
            f'<path class="bad-line" d="M{x:.1f} {_TOP}V{height - _BOTTOM}">'
            f"<title>{safe(said)}</title></path>"
        )
    for incident in missed:
        parts += _crosses(incident, across, up)
    drawn = _svg(height, parts, "Arrivals at barriers over time", "arrivals")
    legend = _WITH_DOTS if total <= _MOST_DOTS else _WITH_BAND
    return drawn + _legend(
        {
            f"key-{kind.replace(' ', '-')}": said
            for kind, said in legend.items()
            if f'class="{kind}"' in drawn
        }
    )


def known_ranks(analysis: Analysis) -> list[int]:
    """Everybody that was heard, or missed."""
    known = set(analysis.facts.heard)
    known.update(*(incident.missing for incident in analysis.incidents))
    return sorted(known)


def _bounds(moments: Iterable[float]) -> tuple[float, float]:
    found = sorted(moments)
    return found[0], found[-1]


def _crosses(incident: Incident, across: "_Across", up: "_Up") -> Iterable[str]:
    """Mark those that never came: each, or, over time, all of a barrier at once."""
    where: dict[float, list[int]] = {}
    for rank in incident.missing:
        where.setdefault(across.of(incident.round, rank), []).append(rank)
    for x, who in list(where.items())[:_MOST_MARKS]:
        how = "never came" if incident.round.kind == TIMEOUT else "had not come"
        said = f"{ranks(who)} {how} to {incident.round.barrier.prefix}"
        yield (
            f'<path class="cross" d="M{x - 5:.1f} {up.never - 5}l10 10m0 -10l-10 10">'
            f"<title>{safe(said)}</title></path>"
        )


def _dots(
    analysis: Analysis,
    seen: Round,
    across: "_Across",
    up: "_Up",
    which: Iterable[int],
) -> Iterable[str]:
    for index in which:
        rank, late = seen.ranks[index], seen.late[index]
        x = across.of(seen, rank)
        host = analysis.facts.host(rank)
        said = (
            f"rank {rank}{f' on {host}' if host else ''}: {duration(late)} after the"
            f" first at {seen.barrier.prefix}, {clock_time(seen.end)}"
        )
        kind = "dot last" if rank == seen.last else "dot"
        yield (
            f'<circle class="{kind}" cx="{x:.1f}" cy="{up(late):.1f}" r="3">'
            f"<title>{safe(said)}</title></circle>"
        )


def _band(rounds: Sequence[Round], across: "_Across", up: "_Up") -> list[str]:
    columns: dict[int, list[Round]] = {}
    for each in rounds:
        if each.ranks:
            share = (across.when(each.end) - _LEFT) / across.width
            column = int(share * _MOST_COLUMNS)
            columns.setdefault(min(column, _MOST_COLUMNS - 1), []).append(each)
    step = across.width / _MOST_COLUMNS
    bars, halves = [], []
    for column, members in sorted(columns.items()):
        x = _LEFT + column * step
        top = up(max(each.spread for each in members))
        half = up(median(each.middle for each in members))
        bars.append(f"M{x:.1f} {up(0.0):.1f}V{top:.1f}h{step:.2f}V{up(0.0):.1f}z")
        halves.append(f"M{x:.1f} {half:.1f}h{step:.2f}")
    return [
        f'<path class="band" d="{"".join(bars)}"/>',
        f'<path class="half" d="{"".join(halves)}"/>',
    ]


def heat_map(analysis: Analysis) -> str:
    """Draw who came late where: a column a barrier or some, a row a rank or some."""
    rounds = analysis.rounds
    known = known_ranks(analysis)
    order = {rank: place for place, rank in enumerate(known)}
    rows, columns = min(len(order), _MOST_ROWS), min(len(rounds), _MOST_COLUMNS)
    of_round = {id(each): place for place, each in enumerate(rounds)}
    latest = max(_LEAST_LATE, *(each.spread - each.middle for each in rounds))
    shades: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    for place, each in enumerate(rounds):
        column, middle = place * columns // len(rounds), each.middle
        for rank, late in zip(each.ranks, each.late, strict=True):
            if rank not in order:
                continue
            cell = order[rank] * rows // len(order), column
            seen.add(cell)
            shade = _shade(late - middle, latest)
            if shade > shades.get(cell, 0):
                shades[cell] = shade
    for incident in analysis.incidents:
        column = of_round[id(incident.round)] * columns // len(rounds)
        for rank in incident.missing:
            cell = order[rank] * rows // len(order), column
            seen.add(cell)
            shades[cell] = len(_SHADES) + 1
    return _drawn_map(analysis, rows, columns, seen, shades, latest, known)


def _shade(behind: float, latest: float) -> int:
    return sum(behind >= share * latest for share in _SHADES)


def _drawn_map(
    analysis: Analysis,
    rows: int,
    columns: int,
    seen: set[tuple[int, int]],
    shades: dict[tuple[int, int], int],
    latest: float,
    known: list[int],
) -> str:
    width = _WIDTH - _LEFT - _RIGHT
    tall = min(18.0, max(3.4, 360 / rows))
    wide = min(width / columns, _WIDEST)
    height = int(_TOP + rows * tall + _BOTTOM)
    paths: dict[int, list[str]] = {}
    for row in range(rows):
        column = 0
        while column < columns:
            cell = row, column
            after = column + 1
            if cell in seen:
                shade = shades.get(cell, 0)
                # Neighbours of one shade are one rectangle.
                while (row, after) in seen and shades.get((row, after), 0) == shade:
                    if after >= columns:
                        break
                    after += 1
                x, y = _LEFT + column * wide, _TOP + row * tall
                paths.setdefault(shade, []).append(
                    f"M{x:.1f} {y:.1f}h{(after - column) * wide:.1f}v{tall:.1f}"
                    f"H{x:.1f}z"
                )
            column = after
    parts = [
        f'<path class="shade{shade}" d="{"".join(drawn)}"/>'
        for shade, drawn in sorted(paths.items())
    ]
    each_row = max(1, math.ceil(rows / 12))
    for row in range(0, rows, each_row):
        first = known[math.ceil(row * len(known) / rows)]
        y = _TOP + (row + 0.5) * tall + 4
        parts.append(_text(_LEFT - 8, y, f"rank {first}", "end"))
    rounds = analysis.rounds
    # A label over so many columns as it is wide, and not beyond the last.
    before = ""
    for column in range(0, columns, math.ceil(max(_LABEL / wide, columns / _TICKS))):
        x = _LEFT + column * wide
        shown = clock_time(rounds[math.ceil(column * len(rounds) / columns)].end)
        if shown != before and (column == 0 or x + _LABEL <= _LEFT + width):
            parts.append(_text(x, height - _BOTTOM + 18, shown, "start"))
            before = shown
    words = [
        "with the others",
        *(f"{duration(share * latest)} and more behind" for share in _SHADES),
        "missing",
    ]
    legend = {f"key{shade}": words[shade] for shade in sorted(paths)}
    said = "Who came late, by rank and barrier"
    return _svg(height, parts, said, "lateness") + _legend(legend)


class _Across:
    """Time, from left to right."""

    width = _WIDTH - _LEFT - _RIGHT

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._seconds = begin, end - begin

    def of(self, seen: Round, _rank: int) -> float:
        """Tell where a rank's arrival is drawn."""
        return self.when(seen.end)

    def when(self, when: float) -> float:
        if self._seconds <= 0:
            return _LEFT + self.width / 2
        return _LEFT + 8 + (when - self._begin) / self._seconds * (self.width - 16)

    def axis(self, height: int) -> Iterable[str]:
        count = _TICKS if self._seconds > _TICKS else 2 if self._seconds > 0 else 1
        for tick in range(count):
            share = tick / (count - 1) if count > 1 else 0.0
            when = self._begin + share * self._seconds
            anchor = "middle" if count == 1 else "start" if not tick else "middle"
            if tick == count - 1 and count > 1:
                anchor = "end"
            yield _text(
                self.when(when), height - _BOTTOM + 20, clock_time(when), anchor
            )


class _AcrossRanks(_Across):
    """Ranks, side by side, of the only barrier there is."""

    def __init__(self, known: Sequence[int]) -> None:
        super().__init__(0.0, 0.0)
        self._known = known
        self._step = self.width / len(known)
        self._places = {rank: place for place, rank in enumerate(known)}

    def of(self, _seen: Round, rank: int) -> float:
        return _LEFT + (self._places[rank] + 0.5) * self._step

    def axis(self, height: int) -> Iterable[str]:
        for place in range(0, len(self._known), math.ceil(len(self._known) / 12)):
            x = _LEFT + (place + 0.5) * self._step
            shown = f"rank {self._known[place]}"
            yield _text(x, height - _BOTTOM + 20, shown, "middle")


class _Up:
    """Seconds after the first, in powers of ten; what is below these is at the foot."""

    never = _TOP

    def __init__(self, most: float, height: int, *, never: bool) -> None:
        # Below, there would be shares of a microsecond.
        self._top = math.ceil(math.log10(max(most, 10.0**_LOWEST)))
        self._low = self._top - _DECADES
        self._above = _TOP + (_NEVER_HEIGHT if never else 0)
        self._height = height - self._above - _BOTTOM

    def __call__(self, seconds: float) -> float:
        power = math.log10(seconds) if seconds > 0 else self._low
        share = (max(power, self._low) - self._low) / (self._top - self._low)
        return self._above + (1 - share) * self._height

    def axis(self) -> Iterable[str]:
        if self._above > _TOP:
            yield _text(_LEFT - 8, self.never + 4, "never", "end")
        for power in range(self._low, self._top + 1):
            y = self(10.0**power)
            shown = "first" if power == self._low else duration(10.0**power)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            yield _text(_LEFT - 8, y + 4, shown, "end")


def _text(x: float, y: float, shown: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(shown)}</text>'


def _svg(height: int, parts: Iterable[str], label: str, name: str) -> str:
    return (
        f'<div class="wide"><svg id="{name}" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{safe(label)}">{"".join(parts)}</svg></div>'
    )


def _legend(colours: Mapping[str, str]) -> str:
    items = (f'<li><i class="{key}"></i>{word}</li>' for key, word in colours.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def described(analysis: Analysis) -> str:
    """Say what the map's rows and columns are, where they stand for several."""
    rounds, known = len(analysis.rounds), len(analysis.facts.heard)
    said = []
    if known > _MOST_ROWS:
        said.append(f"a row is {math.ceil(known / _MOST_ROWS)} ranks")
    if rounds > _MOST_COLUMNS:
        said.append(f"a column is {math.ceil(rounds / _MOST_COLUMNS)} barriers")
    if not said:
        return ""
    return f"Here {' and '.join(said)}, of which the latest arrival is shown."
