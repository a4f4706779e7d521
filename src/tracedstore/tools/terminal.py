"""Text for people: styled lines and a live view on a terminal, plain lines elsewhere.

Importing this module imports rich, which takes about 50 ms. Commands import it when
they have something to print.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from tracedstore.common.text import escape

_PLAIN_WIDTH = 80
# Narrower terminals break the lines themselves.
_MIN_WIDTH = 20


def is_interactive(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the stream is a terminal that may be coloured and redrawn."""
    dumb = environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not environ.get("NO_COLOR") and not dumb


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text in one style, escaped; rich markup in it has no meaning.

    Attributes:
        text: The text.
        style: A rich style.
        indent: The indentation of continuation lines; None for a line that is never
            broken, so that it can be copied.
    """

    text: str
    style: str = ""
    indent: int | None = 0

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Break the text at spaces; shorten words that are longer than a line."""
        text = escape(self.text)
        if self.indent is None:
            yield Text(text, self.style, no_wrap=True, overflow="ignore")
            return
        width = max(options.max_width, _MIN_WIDTH)
        room = width - self.indent
        # The ends of a key are its kind and its number.
        text = re.sub(rf"\S{{{room + 1},}}", lambda word: _ends(word[0], room), text)
        first = Text(text).wrap(console, width)[0].plain.rstrip()
        yield Text(first, self.style)
        if rest := text[len(first) :].lstrip():
            for line in Text(rest).wrap(console, room):
                yield Text(" " * self.indent + line.plain.rstrip(), self.style)


def _ends(word: str, room: int) -> str:
    half = (room - 3) // 2
    return f"{word[:half]}...{word[-half:]}"


@dataclass(frozen=True, slots=True)
class _Cropped:
    """As much of a view as fits the terminal, above an empty line for the cursor.

    The terminal echoes keys where the cursor is. At the end of a full line an echoed
    ^C would begin a line that rich does not know of.
    """

    view: RenderableType

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        lines = console.render_lines(self.view, options, pad=False)
        rows = max(1, options.size.height - 1)
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            lines[rows - 1 :] = [[Segment(f"... {hidden} more lines")]]
        for line in lines:
            yield from line
            yield Segment.line()
        yield Text("")


class _Console(Console):
    """A console that keeps the cursor visible and lets BrokenPipeError pass.

    rich hides the cursor while a view is live, which SIGKILL would leave so. On a
    closed pipe it exits with code 1.
    """

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002 - rich's signature
        return False

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until a redraw is complete. It would leave half a view."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield  # the handler cannot be replaced
        return
    interrupted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


class Screen:
    """Prints lines that stay, and on a terminal redraws a view below them.

    Where the stream is no terminal, NO_COLOR is set or TERM is dumb, lines are plain,
    80 columns wide, and there is no view. Use it in a ``with`` block, whose end leaves
    all of the view. With `quiet` it prints nothing.

    Attributes:
        interactive: Whether there are colours and a view.
        console: The rich console, with the width and height of the terminal.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self.interactive = is_interactive(stream) and not quiet
        self.console = _Console(
            file=stream,
            force_terminal=self.interactive,
            color_system="auto" if self.interactive else None,
            width=None if self.interactive else _PLAIN_WIDTH,
            quiet=quiet,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._printed: list[RenderableType] = []
        self._live: Live | None = None
        self._view: RenderableType = ""
        self._width = self.console.width
        self._continued = False
        self._sigcont: Any = None

    def __enter__(self) -> Self:
        if self.interactive:
            self._sigcont = signal.signal(signal.SIGCONT, self._on_sigcont)
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.clear()
        finally:
            if self.interactive:
                signal.signal(signal.SIGCONT, self._sigcont)

    def print(self, *lines: RenderableType) -> None:
        """Print lines above the view."""
        with _uninterrupted():
            self._adapt()
            if self.interactive:
                self._printed += lines
            for line in lines:
                self.console.print(line, crop=False)

    def show(self, view: RenderableType) -> None:
        """Draw the view, as much of it as fits the terminal."""
        if not self.interactive:
            return
        with _uninterrupted():
            self._adapt()
            self._view = view
            if self._live is None:
                # Without a thread that refreshes: commands fork while the view is live.
                self._live = Live(
                    console=self.console,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._live.update(_Cropped(view), refresh=True)

    def clear(self) -> None:
        """End the view."""
        if self._live is not None:
            with _uninterrupted():
                live, self._live = self._live, None
                live.update(self._view)
                live.stop()

    def _adapt(self) -> None:
        """Redraw after a stop, and print all lines again on a narrower terminal.

        Some terminals cut lines that have become too long and others break them, so
        the number of lines above the cursor is unknown.
        """
        narrower = self.console.width < self._width
        self._width = self.console.width
        if self._live is not None and (self._continued or narrower):
            # Without a last refresh, which would erase what a shell has written.
            self._live = None
            self.console.clear_live()
            self.console.pop_render_hook()
        self._continued = False
        if self.interactive and narrower:
            self.console.clear()
            for line in self._printed:
                self.console.print(line, crop=False)

    def _on_sigcont(self, _number: int, _frame: FrameType | None) -> None:
        self._continued = True
