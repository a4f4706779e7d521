"""Rows of styled text of a known width: what all views consist of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.style import Style

from tracedstore.common.text import escape
from tracedstore.tools.job_view import RankState

# The sixteen colours that every terminal has.
STYLES: Final = {
    "": Style(),
    "dim": Style(dim=True),
    "selected": Style(reverse=True, bold=True),
    "title": Style(bold=True),
    "heading": Style(bold=True),
    "host": Style(),
    "chart": Style(color="cyan"),
    "last": Style(color="yellow"),
    "good": Style(color="green", bold=True),
    "notable": Style(color="yellow", bold=True),
    "bad": Style(color="red", bold=True),
    "gone": Style(color="red", bold=True, reverse=True),
    "stopped": Style(color="magenta", bold=True, reverse=True),
    "awaited": Style(color="red", bold=True),
    "not_started": Style(color="magenta", bold=True),
    "no_answer": Style(color="magenta"),
    "waiting": Style(color="yellow"),
    "running": Style(color="green"),
}
SELECTED: Final = Style(reverse=True)

# What a row or a part of it stands for: a rank, a barrier, a fold.
Target = tuple[str, object]

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row.

    Attributes:
        text: The text, escaped: a terminal executes nothing in it.
        style: A name of `STYLES`.
        target: What it stands for, if that can be selected.
    """

    text: str
    style: str = ""
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class TextRow:
    """One line.

    Attributes:
        spans: Its parts.
        target: What it stands for, if that can be selected.
    """

    spans: tuple[Span, ...] = ()
    target: Target | None = None

    @property
    def text(self) -> str:
        """The line without styles."""
        return "".join(span.text for span in self.spans).rstrip()


def row(*parts: Span | str, target: Target | None = None) -> TextRow:
    """Return a row of spans and of unstyled text, which is escaped."""
    spans = (Span(escape(one)) if isinstance(one, str) else one for one in parts)
    return TextRow(tuple(spans), target)


def styled(text: str, style: str) -> Span:
    """Return a span of text, escaped."""
    return Span(escape(text), style)


def state_style(state: RankState) -> str:
    """Return the name of a state's style."""
    return state.name.lower()


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Escape a text and pad it to a width; a longer one keeps both of its ends."""
    return pad(shorten(text, width), width, right=right)


def shorten(text: str, width: int) -> str:
    """Escape a text; one longer than the width keeps both of its ends."""
    # Before escaping, because that takes the time of the whole text.
    if len(text) > 2 * width:
        text = text[:width] + text[-width:]
        cut = True
    else:
        cut = False
    shown = escape(text)
    if not cut and cell_len(shown) <= width:
        return shown
    if width <= len("..") + 1:
        return set_cell_size(shown, max(0, width))
    # The ends of a key or a host are its kind and its number.
    tail = (width - 2) // 2
    end = shown[-tail:]
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(shown, width - 2 - cell_len(end)) + ".." + end


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Pad a text to a width in columns."""
    blank = " " * max(0, width - cell_len(text))
    return blank + text if right else text + blank


def remaining(text: str, width: int) -> int:
    """Return how many columns of a width a text leaves, at least one."""
    return max(1, width - cell_len(text))


def wrap(
    text: str, width: int, style: str = "", indent: int = 0, limit: int = 1000
) -> list[TextRow]:
    """Break a text at spaces into rows; a word longer than a row is broken anywhere."""
    words = escape(text[:limit]).split(" ")
    rows: list[str] = []
    line = words[0]
    for word in words[1:]:
        room = width - (indent if rows else 0)
        if cell_len(line) + 1 + cell_len(word) <= room:
            line += f" {word}"
            continue
        rows.append(line)
        room = width - indent
        while cell_len(word) > room:
            head = set_cell_size(word, room).rstrip() or word[:1]
            rows.append(head)
            word = word[len(head) :]  # noqa: PLW2901 - what is left of it
        line = word
    rows.append(line)
    return [
        TextRow((Span(" " * indent if number else ""), Span(one, style)))
        for number, one in enumerate(rows)
    ]


def sparkline(history: Sequence[float], width: int) -> str:
    """Return the latest values as bars, relative to the largest one."""
    shown = history[-width:]
    largest = max(shown, default=0.0)
    if largest <= 0:
        return BARS[0] * len(shown)
    return "".join(BARS[round(one / largest * (len(BARS) - 1))] for one in shown)


def plain_text(rows: Iterable[TextRow]) -> str:
    """Return rows as text."""
    return "".join(f"{one.text}\n" for one in rows)
