"""The screen of ``tracedstore top``: its parts, its keys, and how it is drawn."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from tracedstore.tools.job_view import JobView, RankName
from tracedstore.tools.top import views
from tracedstore.tools.top.rows import (
    SELECTED,
    STYLES,
    Span,
    Target,
    TextRow,
    row,
    shorten,
    styled,
)
from tracedstore.tools.top.saving import (
    Files,
    Seen,
    report_files,
    screen_files,
    send_files,
    write_files,
)
from tracedstore.tools.top.selection import Selection

INTERRUPTED = 130
# 128 + the number of the signal, as shells report it.
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: INTERRUPTED}
# Seconds for which a message replaces the keys.
_MESSAGE_SECONDS = 8.0
_HEADLINE_ROWS = 3
_MIN_WIDTH = 20
_NARROW_KEYS = "Enter  Esc  i why  s stacks  r report  e save  ? help"
# What a click on a word of the last line presses.
_CLICKED_KEYS = {
    **{key: key for key in ("i", "s", "r", "e")},
    "Enter": "enter",
    "Esc": "escape",
    "/": "slash",
    "?": "question_mark",
}

Topic = Callable[[int], list[TextRow]]


class Lines(ScrollView, can_focus=False):
    """Shows rows; those that do not fit are reached by scrolling.

    Only the visible ones are drawn, so thousands of rows cost nothing.
    """

    class Clicked(Message):
        """A row was clicked.

        Attributes:
            target: What the clicked part stands for.
        """

        def __init__(self, target: Target) -> None:
            super().__init__()
            self.target = target

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.rows: list[TextRow] = []
        self.selected: Target | None = None

    def show(self, rows: list[TextRow], selected: Target | None = None) -> None:
        """Replace all rows."""
        self.rows, self.selected = rows, selected
        self.virtual_size = Size(self.scrollable_content_region.width, len(rows))
        self.refresh()

    def reveal(self, line: int) -> None:
        """Scroll as far as a row needs to be visible."""
        self.scroll_to_region(Region(0, line, 1, 1), animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        base = self.rich_style
        if index >= len(self.rows):
            return Strip.blank(width, base)
        row = self.rows[index]
        whole = self.selected is not None and row.target == self.selected
        segments = []
        for span in row.spans:
            style = base + STYLES[span.style]
            chosen = span.target is not None and span.target == self.selected
            if whole or chosen:
                style = _select(style)
            segments.append(Segment(span.text, style))
        blank = _select(base) if whole else base
        return Strip(segments).extend_cell_length(width, blank).crop(0, width)

    def on_click(self, event: events.Click) -> None:
        """Report what was clicked."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        index = offset.y + self.scroll_offset.y
        if not 0 <= index < len(self.rows):
            return
        row, column = self.rows[index], 0
        for span in row.spans:
            column += Segment(span.text).cell_length
            if offset.x < column:
                if span.target is not None:
                    self.post_message(self.Clicked(span.target))
                    return
                break
        if row.target is not None:
            self.post_message(self.Clicked(row.target))


def _select(style: Style) -> Style:
    # A part that is reversed already would be plain.
    return style + (
        Style(reverse=False, underline=True, bold=True) if style.reverse else SELECTED
    )


class TopApp(App[int]):
    """The screen, of a running job or of a finished one.

    Args:
        folder: Where `e` and `r` write.

    Attributes:
        selection: What is selected.
        seen: What was seen so far.
        stacks: What ranks answered when they were asked for their stacks.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    KEYS = "1-6 views  arrows  Enter  / filter  s stacks  e save  r report  ? help  q"
    HAS_REPLAY_KEYS = False
    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    Lines { scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
            overflow-x: hidden; background: ansi_default; color: ansi_default;
            scrollbar-background: ansi_default; scrollbar-color: ansi_bright_black; }
    #title, #headline, #tabs, #notes, #footer { height: 1; overflow-y: hidden; }
    #detail { height: 1fr; border-top: solid ansi_bright_black; }
    .zoomed #main { display: none; }
    #filter { display: none; height: 1; border: none; padding: 0;
              background: ansi_default; color: ansi_default; }
    .filtering #filter { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"view('{view}')")
            for number, view in enumerate(views.VIEWS, 1)
        ),
        Binding("tab", "next_view(1)", priority=True),
        Binding("shift+tab", "next_view(-1)", priority=True),
        Binding("up,k", "move(-1, 0)"),
        Binding("down,j", "move(1, 0)"),
        Binding("left,h", "move(0, -1)"),
        Binding("right,l", "move(0, 1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("home,g", "move(-1000000, -1000000)"),
        Binding("end,G", "move(1000000, 0)"),
        Binding("enter", "open"),
        Binding("escape", "leave", priority=True),
        Binding("slash", "filter"),
        Binding("question_mark", "help"),
        Binding("i", "headline"),
        Binding("s", "stacks"),
        Binding("e", "save"),
        Binding("r", "report"),
        Binding("q", "quit_with(0)"),
        Binding("ctrl+c,ctrl+q", f"quit_with({INTERRUPTED})", priority=True),
    ]

    def __init__(self, folder: Path) -> None:
        # The terminal's own colours, whatever its background.
        super().__init__(ansi_color=True)
        self.selection = Selection()
        self.seen = Seen()
        self.stacks: dict[RankName, tuple[str, ...]] = {}
        self._folder = folder
        self._topic: Topic | None = None
        self._message: tuple[str, float] = ("", 0.0)

    def shown_job(self) -> JobView:
        """Return what to show."""
        raise NotImplementedError

    # Parts

    def compose(self) -> ComposeResult:
        """Create the parts of the screen, from top to bottom."""
        yield Lines("title")
        yield Lines("headline")
        yield Lines("tabs")
        yield Input(placeholder="host, rank, 8-15, or a state", id="filter")
        yield Lines("main")
        yield Lines("detail")
        yield Lines("notes")
        yield Lines("footer")

    def on_mount(self) -> None:
        """End in order when a signal arrives: Textual restores the terminal."""
        loop = asyncio.get_running_loop()
        for number, code in SIGNALS.items():
            loop.add_signal_handler(number, self.exit, code)
        self.query_one("#filter", Input).disabled = True
        self.set_interval(1.0, self._tick)
        self.draw()

    def on_resize(self, _event: events.Resize) -> None:
        """Arrange everything for the new size."""
        self.call_after_refresh(self.draw)

    def _has_parts(self) -> bool:
        """Return whether there is something to draw on: not so while it ends."""
        return bool(self.query("#footer"))

    def lines(self, name: str) -> Lines:
        """Return a part of the screen."""
        return self.query_one(f"#{name}", Lines)

    @property
    def zoomed(self) -> bool:
        """Whether the details have the whole screen."""
        return self.screen.has_class("zoomed")

    # Drawing

    def draw(self) -> None:
        """Draw everything."""
        if not self._has_parts():
            return
        job, width = self.shown_job(), max(_MIN_WIDTH, self.size.width)
        headline = self._draw_frame(job, width)
        # Title, tabs, filter, border and footer.
        filtering = self.screen.has_class("filtering")
        others = 4 + filtering + len(self.lines("notes").rows)
        body = max(4, self.size.height - len(headline) - others)
        main = self.lines("main")
        height = body * 3 // 5
        self.selection.arrange(job, width - 1, height)
        # What the details leave free belongs to the view: fewer hosts are folded.
        details = min(len(self.detail_rows(job, width - 1)), body - height)
        if height < body - details:
            height = body - details
            self.selection.arrange(job, width - 1, height)
        main.styles.height = max(1, min(len(self.selection.rows), height))
        main.show(self.selection.rows, self.selection.target)
        self._draw_detail(job, width - 1)

    def _draw_frame(self, job: JobView, width: int) -> list[TextRow]:
        clock = time.strftime("%H:%M:%S", time.localtime(job.time))
        self.lines("title").show([views.title_row(job, width, clock)])
        limit = max(_HEADLINE_ROWS, self.size.height // 8)
        headline = views.headline_rows(job, width, limit)
        self.lines("headline").styles.height = len(headline)
        self.lines("headline").show(headline)
        self.lines("tabs").show([self._tabs(width)])
        self.lines("footer").show([self.footer(width)])
        notes = self.lines("notes")
        notes.show(self.note_rows(width))
        notes.display = bool(notes.rows)
        notes.styles.height = len(notes.rows)
        return headline

    def note_rows(self, _width: int) -> list[TextRow]:
        """Return further lines above the last one."""
        return []

    def footer(self, width: int) -> TextRow:
        """Return the last line: a message, or the keys."""
        text, _ = self._message
        if text:
            return row(Span(shorten(text, width), "notable"))
        keys = self.KEYS if width >= views.NARROW else _NARROW_KEYS
        spans = []
        for one in keys.split("  "):
            word = one.partition(" ")[0]
            key = _CLICKED_KEYS.get(word)
            target: Target | None = None if key is None else ("key", key)
            spans += [Span(one, "dim", target), Span("  ")]
        return row(*spans)

    def _tabs(self, width: int) -> TextRow:
        spans = []
        for number, view in enumerate(views.VIEWS, 1):
            style = "selected" if view == self.selection.view else ""
            # A screen that is as narrow as a phone's is tapped.
            name = f"{number} {view}" if width >= views.NARROW else view
            spans.append(Span(f" {name} ", style, ("view", view)))
        if self.selection.pattern:
            spans.append(styled(f"  filter: {self.selection.pattern}", "notable"))
        return TextRow(tuple(spans))

    def _draw_detail(self, job: JobView, width: int) -> None:
        self.lines("detail").show(self.detail_rows(job, width))

    def detail_rows(self, job: JobView, width: int) -> list[TextRow]:
        """Return the details: of what is selected, unless a key has shown others."""
        if self._topic is not None:
            return self._topic(width)
        return self.selection.detail_rows(job, width, self.stacks)

    def _tick(self) -> None:
        text, until = self._message
        if text and time.monotonic() > until:
            self._message = "", 0.0
        if self._has_parts():
            self._draw_frame(self.shown_job(), max(_MIN_WIDTH, self.size.width))

    def say(self, text: str) -> None:
        """Show a message in place of the keys, for a while."""
        self._message = text, time.monotonic() + _MESSAGE_SECONDS
        if self._has_parts():
            self.lines("footer").show([self.footer(self.size.width)])

    # Keys

    def action_view(self, view: str) -> None:
        """Show another view."""
        self.selection.view, self._topic = view, None
        self.screen.remove_class("zoomed")
        self.lines("main").scroll_to(y=0, animate=False)
        self.draw()

    def action_next_view(self, step: int) -> None:
        """Show the next view, or the one before."""
        index = views.VIEWS.index(self.selection.view) + step
        self.action_view(views.VIEWS[index % len(views.VIEWS)])

    def action_move(self, lines: int, columns: int) -> None:
        """Move the selection; scroll where there is none."""
        if self.zoomed:
            self.lines("detail").scroll_relative(y=lines, animate=False)
            return
        main = self.lines("main")
        line = self.selection.move(lines, columns)
        if line is None:
            main.scroll_relative(y=lines, animate=False)
            return
        main.show(self.selection.rows, self.selection.target)
        main.reveal(line)
        self.lines("detail").scroll_to(y=0, animate=False)
        self._draw_detail(self.shown_job(), self.size.width - 1)

    def action_page(self, pages: int) -> None:
        """Move by a screen."""
        part = self.lines("detail" if self.zoomed else "main")
        self.action_move(pages * max(1, part.size.height - 1), 0)

    def action_open(self) -> None:
        """Show all of what is selected, or hosts that are folded."""
        if self.selection.unfold():
            self.draw()
        else:
            self.zoom(None)

    def zoom(self, topic: Topic | None) -> None:
        """Give the details the whole screen; about a topic, or the selection."""
        self._topic = topic
        self.screen.add_class("zoomed")
        self.lines("detail").scroll_to(y=0, animate=False)
        self.draw()

    def action_leave(self) -> None:
        """Leave what Enter, a key or a filter has shown."""
        if self.zoomed:
            self.screen.remove_class("zoomed")
            self._topic = None
        else:
            self.query_one("#filter", Input).value = ""
            self._end_filter()
            self.selection.fold()
        self.draw()

    def action_filter(self) -> None:
        """Ask for a filter."""
        if self.selection.view != views.VIEWS[0] or self.zoomed:
            self.action_view(views.VIEWS[0])
        self.screen.add_class("filtering")
        field = self.query_one("#filter", Input)
        field.disabled = False
        field.focus()

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self.selection.pattern = event.value
        self.draw()

    @on(Input.Submitted)
    def _end_filter(self) -> None:
        self.screen.remove_class("filtering")
        self.query_one("#filter", Input).disabled = True
        self.set_focus(None)
        self.draw()

    def action_help(self) -> None:
        """Show the keys and the states."""
        self.zoom(lambda width: views.help_rows(width, replay=self.HAS_REPLAY_KEYS))

    def action_headline(self) -> None:
        """Show the whole headline and its evidence."""
        self.zoom(lambda width: views.detail_of_headline(self.shown_job(), width))

    def action_stacks(self) -> None:
        """Ask for the stacks of the selected rank."""
        self.say("the stacks of a finished job are in its logs")

    def action_save(self) -> None:
        """Save the screen as text and as SVG."""
        self.save(screen_files(self))

    def action_report(self) -> None:
        """Write a report of what was seen so far."""
        seen = self.seen.copy()
        self.save_later(lambda: report_files(seen))

    def save(self, files: Files) -> None:
        """Write files into the folder; send them to the browser, if there is one."""
        if not files:
            text = "nothing to report yet: no barrier with times and no stall was seen"
        elif self.is_web:
            text = send_files(files, self)
        else:
            text = write_files(files, self._folder)
        self.say(text)

    def save_later(self, make: Callable[[], Files]) -> None:
        """Make the files of a report in a thread, and save them."""
        self.say("writing the report ...")

        def work() -> None:
            self.call_from_thread(self.save, make())

        self.run_worker(work, thread=True, exclusive=True)

    def action_quit_with(self, code: int) -> None:
        """End with an exit code."""
        self.exit(code)

    @on(Lines.Clicked)
    def _clicked(self, event: Lines.Clicked) -> None:
        kind, value = event.target
        if kind == "view":
            self.action_view(str(value))
        elif kind == "key":
            self.simulate_key(str(value))
        else:
            self.selection.select(event.target)
            self.draw()
