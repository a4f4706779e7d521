"""The terminal: lines that stay, and below them a view that is drawn anew.

Where there is no terminal, or NO_COLOR is set, there are only the lines.
"""

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Self, TextIO

_WIDTH = 80
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def is_live(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the stream can be drawn on."""
    dumb = environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not environ.get("NO_COLOR") and not dumb


class Screen:
    """Writes to one stream; use it in a ``with`` block, which leaves it tidy.

    Args:
        stream: Where to; None for nowhere.
        live: Draw, and use colours.
    """

    def __init__(self, stream: TextIO | None, *, live: bool) -> None:
        self._stream = stream
        self._live = live
        self._view: list[str] = []
        size = shutil.get_terminal_size((_WIDTH, 24))
        # The last column is left alone: some terminals wrap when it is written.
        self._columns = min(_WIDTH, size.columns) - 1 if live else _WIDTH
        self._rows = size.lines - 2

    def __enter__(self) -> Self:
        if self._live:
            self._write("\x1b[?25l")
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live:
            self._write(self._erased() + "\x1b[?25h")

    def say(self, text: str = "", style: str = "", indent: int = 0) -> None:
        """Write a line that stays; a long one goes on below, indented."""
        words = textwrap.wrap(
            text,
            self._columns,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
            break_long_words=False,
            drop_whitespace=True,
        )
        lines = [self._styled(line, style) for line in words or [""]]
        self._write(self._erased() + "\n".join(lines) + "\n" + self._drawn())

    def show(self, head: str, lines: Sequence[str]) -> None:
        """Draw the view: a head, and as many lines as there is room for."""
        if not self._live:
            return
        room = max(0, self._rows - 2)
        shown = list(lines[:room])
        if len(lines) > room:
            shown[-1:] = [f"... and {len(lines) - room + 1} more"]
        erased = self._erased()
        self._view = [
            "",
            self._styled(head[: self._columns], "bold"),
            *(self._styled(line[: self._columns], "dim") for line in shown),
        ]
        self._write(erased + self._drawn())

    def clear(self) -> None:
        """Take the view away."""
        self._write(self._erased())
        self._view = []

    def _styled(self, line: str, style: str) -> str:
        if not self._live or not style or not line:
            return line
        return f"\x1b[{_STYLES[style]}m{line}\x1b[0m"

    def _erased(self) -> str:
        return f"\x1b[{len(self._view)}A\x1b[J" if self._view else ""

    def _drawn(self) -> str:
        return "".join(f"{line}\n" for line in self._view)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
