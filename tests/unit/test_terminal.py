"""Lines and a live view on a terminal, plain lines elsewhere."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console, Group

from support.terminal import frames
from tracedstore.common.text import escape
from tracedstore.tools.terminal import Line, Screen, is_interactive


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the terminal a type and a size."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def rendered(line: Line, width: int = 80) -> list[str]:
    """Render a line without styles."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(line, crop=False)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("environ", "interactive"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_is_interactive(environ: dict[str, str], interactive: bool) -> None:
    """Only a terminal is, unless TERM is dumb or unset, or NO_COLOR has a value."""
    assert is_interactive(Terminal(), environ) is interactive
    assert not is_interactive(io.StringIO(), environ)


class TestLine:
    """Wrapping and escaping."""

    @pytest.mark.parametrize(
        ("data", "shown"),
        [
            ("\x1b[2J\x07", r"\x1b[2J\x07"),
            ("\x9b31m", r"\x9b31m"),
            ("a\nb\r\t\x08", r"a\nb\r\t\x08"),
            ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
            ("\u200b\ufeff", r"\u200b\ufeff"),
            ("\udcff", r"\udcff"),
            ("straße/7 節点", "straße/7 節点"),
        ],
    )
    def test_escape(self, data: str, shown: str) -> None:
        """Characters that a terminal executes, reorders or hides are spelled out."""
        assert escape(data) == shown
        assert rendered(Line(data)) == [shown]

    def test_markup_is_text(self) -> None:
        """Neither rich's markup nor its emoji codes in data are interpreted."""
        data = "[bold red]key[/] :smile: [link=file:///etc]x[/link]"

        assert rendered(Line(data)) == [data]

    def test_indent(self) -> None:
        """A long line is broken at spaces; continuation lines are indented."""
        first, second = rendered(Line("  1.0 s  " + "word " * 20, indent=9))

        assert first == "  1.0 s  " + " ".join(["word"] * 14)
        assert second == " " * 9 + " ".join(["word"] * 6)

    def test_long_words(self) -> None:
        """A word that is longer than a line is shortened to its two ends."""
        for width in (80, 40, 20):
            lines = rendered(Line(f"  first{'x' * 500}/7: 1", indent=6), width)

            assert max(map(len, lines)) <= width
            assert lines[0].startswith("  first")
            assert "x/7:" in lines[0]

    def test_wide_characters(self) -> None:
        """Columns are counted, not characters."""
        lines = rendered(Line("節点 " * 10), width=20)

        assert lines == ["節点 節点 節点 節点"] * 2 + ["節点 節点"]

    def test_unbroken(self) -> None:
        """A line without an indent stays whole, to be copied."""
        path = "/a long/path" * 20

        assert rendered(Line(path, indent=None)) == [path]


class TestScreen:
    """Lines that stay, and a view below them."""

    def test_plain(self) -> None:
        """A stream that is no terminal gets lines of 80 columns, and no escapes."""
        stream = io.StringIO()
        with Screen(stream) as screen:
            screen.print(Line("word " * 20, "bold red"))
            screen.show(Line("view", "dim"))
            screen.clear()

        first, second = stream.getvalue().splitlines()
        assert (len(first), second) == (79, "word word word word")

    @pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"])
    def test_plain_is_not_forced(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Variables that rich reads do not put escapes into a file."""
        monkeypatch.setenv(name, "1")
        stream = io.StringIO()
        with Screen(stream) as screen:
            screen.print(Line("text", "bold red"))
            screen.show(Line("view"))

        assert stream.getvalue() == "text\n"

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_plain_terminal(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A terminal gets plain lines where colours are unwanted or unknown."""
        monkeypatch.setenv(name, value)
        stream = Terminal()
        with Screen(stream) as screen:
            screen.print(Line("text", "bold red"))
            screen.show(Line("view"))

        assert stream.getvalue() == "text\n"

    def test_view(self) -> None:
        """A line is printed above the view, which is drawn again below it."""
        stream = Terminal()
        with Screen(stream) as screen:
            screen.show(Group(Line("head"), Line("row", "dim")))
            start = stream.tell()
            screen.print(Line("news", "red"))
            printed = stream.getvalue()[start:]

        erased = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * 2
        assert printed == f"{erased}\x1b[31mnews\x1b[0m\nhead\n\x1b[2mrow\x1b[0m\n"
        styled = ["\x1b[31mnews\x1b[0m", "head", "\x1b[2mrow\x1b[0m", ""]
        assert [*frames(stream.getvalue())][-1] == styled

    def test_cursor_stays_visible(self) -> None:
        """No mode of the terminal is changed, so SIGKILL leaves none changed."""
        stream = Terminal()
        with Screen(stream) as screen:
            screen.show(Line("view"))

        assert "\x1b[?" not in stream.getvalue()

    def test_view_is_kept(self) -> None:
        """All of the last view stays, also what did not fit."""
        stream = Terminal()
        rows = [f"row {number}" for number in range(30)]
        with Screen(stream) as screen:
            screen.show(Group(*map(Line, rows)))
            (shown,) = frames(stream.getvalue())
        *_, kept = frames(stream.getvalue())

        # The last line is for the cursor, and for keys that the terminal echoes.
        assert shown == [*rows[:22], "... 8 more lines", ""]
        assert kept == [*rows, ""]

    @pytest.mark.parametrize("position", range(3))
    def test_interrupted_redraw(self, position: int) -> None:
        """Ctrl-C in the middle of a redraw leaves the whole view."""

        class Interrupted(Terminal):
            texts = 0

            def write(self, text: str) -> int:
                if "new" in text:
                    if self.texts == position:
                        signal.raise_signal(signal.SIGINT)
                    self.texts += 1
                return super().write(text)

        def draw() -> None:
            with Screen(stream) as screen:
                screen.show(Group(Line("old 1"), Line("old 2"), Line("old 3")))
                for _ in range(3):
                    screen.show(Group(Line("new 1"), Line("new 2")))

        stream = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            draw()

        *_, kept = frames(stream.getvalue())
        assert kept == ["new 1", "new 2", ""]
        assert stream.getvalue().endswith("\n")

    def test_narrower(self) -> None:
        """On a narrower terminal the lines are printed again on a cleared screen."""
        stream = Terminal()
        with Screen(stream) as screen:
            screen.print(Line("word " * 12, indent=2))
            screen.show(Line("view"))
            start = stream.tell()
            screen.console.width = 40
            screen.show(Line("v" * 80))
            narrow = stream.getvalue()[start:]
            start = stream.tell()
            screen.console.width = 200
            screen.show(Line("v" * 80))
            wide = stream.getvalue()[start:]

        eight, four = " ".join(["word"] * 8), " ".join(["word"] * 4)
        short = "v" * 18 + "..." + "v" * 18
        assert narrow == f"\x1b[2J\x1b[H{eight}\n  {four}\n{short}\n"
        assert wide == "\r\x1b[2K\x1b[1A\x1b[2K" + "v" * 80 + "\n"

    def test_continues_after_a_stop(self) -> None:
        """After Ctrl-Z and fg the view is drawn below the text of the shell."""
        stream = Terminal()
        before = signal.getsignal(signal.SIGCONT)
        with Screen(stream) as screen:
            screen.show(Group(Line("head"), Line("row")))
            start = stream.tell()
            signal.raise_signal(signal.SIGCONT)
            screen.show(Group(Line("head"), Line("row")))
            drawn = stream.getvalue()[start:]

        assert drawn == "head\nrow\n"
        assert signal.getsignal(signal.SIGCONT) is before

    def test_closed_pipe(self) -> None:
        """A closed pipe raises BrokenPipeError."""
        reader, writer = os.pipe()
        os.close(reader)
        with (
            pytest.raises(BrokenPipeError),
            os.fdopen(writer, "w", encoding="utf-8") as stream,
            Screen(stream) as screen,
        ):
            screen.print(Line("text"))

    def test_starts_no_thread(self) -> None:
        """A command may fork while the view is live."""
        script = (
            "import io, threading\n"
            "from tracedstore.tools.terminal import Line, Screen\n"
            "class Terminal(io.StringIO):\n"
            "    def isatty(self):\n"
            "        return True\n"
            "with Screen(Terminal()) as screen:\n"
            "    screen.show(Line('view'))\n"
            "    print(screen.interactive, threading.active_count())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert done.stdout == "True 1\n", done.stderr
