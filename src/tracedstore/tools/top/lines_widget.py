"""The only widget of the screen: rows of text that scroll, with a selection."""

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tracedstore.tools.top.rows import Row, Target
from tracedstore.tools.top.theme import SELECTED, STYLES


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
        self.rows: list[Row] = []
        self.selected: Target | None = None

    def show(self, rows: list[Row], selected: Target | None = None) -> None:
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
