"""The terminal: lines that stay, and below them a view that is drawn anew.

Where there is no terminal, or NO_COLOR is set, there are only the lines. The cursor is
not hidden: whatever ends this, SIGKILL included, nothing is to be put right again.
"""

import os
import shutil
import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Self, TextIO

_NARROWEST, _WIDTH = 20, 80
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def is_live(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the stream can be drawn on."""
    dumb = environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not environ.get("NO_COLOR") and not dumb


@dataclass(frozen=True, slots=True)
class Line:
    """A line in one style.

    Attributes:
        text: What it says.
        style: How it looks.
        indent: How far to the right it goes on below, where it is too long; None for
            one that stays whole, to be copied.
    """

    text: str
    style: str = ""
    indent: int | None = 0


class Screen:
    """Writes to one stream; use it in a ``with`` block, which leaves it tidy.

    Args:
        stream: Where to; None for nowhere.
        live: Draw, and use colours.
    """

    def __init__(self, stream: TextIO | None, *, live: bool) -> None:
        self._stream = stream
        self._live = live
        self._said: list[Line] = []
        self._view: list[str] = []
        self._columns, self._rows = self._size()

    def __enter__(self) -> Self:
        if self._live:
            self._before = signal.signal(signal.SIGCONT, self._go_on)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live:
            self.clear()
            signal.signal(signal.SIGCONT, self._before)

    def say(self, text: str = "", style: str = "", indent: int | None = 0) -> None:
        """Write a line that stays; a long one goes on below, indented."""
        line = Line(text, style, indent)
        self._said.append(line)
        self._write(self._erased() + self._wrapped(line) + self._drawn())

    @property
    def room(self) -> int:
        """How many lines the view may have below its head."""
        # An empty one before it, and the one that the cursor stands in.
        return max(1, self._rows - 4)

    def show(self, head: str, lines: Sequence[Line]) -> None:
        """Draw the view: a head, and as many lines as there is room for."""
        if not self._live:
            return
        erased = self._resized() or self._erased()
        room = self.room
        shown = list(lines[:room])
        if len(lines) > room:
            shown[-1:] = [Line(f"... and {len(lines) - room + 1} more", "dim")]
        self._view = [
            "",
            *(
                self._styled(line.text[: self._columns], line.style)
                for line in (Line(head, "bold"), *shown)
            ),
        ]
        self._write(erased + self._drawn())

    def clear(self) -> None:
        """Take the view away."""
        self._write(self._erased())
        self._view = []

    def _size(self) -> tuple[int, int]:
        size = shutil.get_terminal_size((_WIDTH, 24))
        # The last column is left alone: some terminals wrap when it is written.
        columns = max(_NARROWEST, min(_WIDTH, size.columns)) - 1
        return columns if self._live else _WIDTH, size.lines

    def _resized(self) -> str:
        """Where lines do not fit any more, wipe the screen and say all of it again.

        Some terminals cut such lines, others wrap them: how many there are above the
        cursor is not known.
        """
        before = self._columns
        self._columns, self._rows = self._size()
        if self._columns >= before:
            return ""
        return "\x1b[H\x1b[J" + "".join(map(self._wrapped, self._said))

    def _go_on(self, _number: int, _frame: FrameType | None) -> None:
        # After Ctrl-Z and fg: others have written below the view, which stays.
        self._view = []

    def _wrapped(self, line: Line) -> str:
        parts = [line.text]
        if line.indent is not None and len(line.text) > self._columns:
            parts = textwrap.wrap(
                line.text,
                self._columns,
                subsequent_indent=" " * line.indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
        return "".join(f"{self._styled(part, line.style)}\n" for part in parts)

    def _styled(self, text: str, style: str) -> str:
        if not self._live or not style or not text:
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"

    def _erased(self) -> str:
        # From the first column: a terminal shows what somebody types, Ctrl-C too.
        return f"\r\x1b[{len(self._view)}A\x1b[J" if self._view else ""

    def _drawn(self) -> str:
        return "".join(f"{line}\n" for line in self._view)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
