"""The styles of the screen: the sixteen colours that every terminal has."""

from typing import Final

from rich.style import Style

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
