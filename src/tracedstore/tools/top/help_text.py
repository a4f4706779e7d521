"""The help of the screen."""

from typing import Final

from tracedstore.tools.top.model import GLYPHS, State
from tracedstore.tools.top.rows import Row, Span, row, state_style, styled, wrap

_KEYS: Final = (
    ("1 to 5, Tab", "fleet, barriers, stragglers, rendezvous, store"),
    ("arrows, Page, Home, End", "select; a click does it too"),
    ("Enter", "show all of what is selected; show hosts that are folded"),
    ("Esc", "back; remove the filter"),
    ("/", "filter the fleet: a host, a rank, ranks 8-15, or a state"),
    ("s", "the stacks of the selected rank, asked through the store"),
    ("i", "the whole headline, its evidence and what could not be read"),
    ("e", "save the screen as text and as SVG, in this folder or the browser's"),
    ("r", "write a report (HTML) of what was seen so far, there too"),
    ("q, Ctrl-C", "quit"),
)
_REPLAY_KEYS: Final = (
    ("Space", "pause, go on"),
    (", and .", "one step back, one step on"),
    ("< and >", "slower, faster"),
    ("n and p", "the next time at which something went wrong, the one before"),
    ("0", "from the start"),
)
_STATES: Final = {
    State.GONE: "its process has ended",
    State.STOPPED: "its process is alive and does not run Python code",
    State.AWAITED: "the job waits for it",
    State.NOT_STARTED: "it has not registered in the store",
    State.NO_ANSWER: "its endpoint is silent; others of its host answer",
    State.WAITING: "it waits in a barrier or a Store call",
    State.RUNNING: "it has registered, and nothing else is known",
}


def help_rows(width: int, *, replay: bool) -> list[Row]:
    """Return the keys and the states."""
    rows = [row(styled(" keys", "heading"))]
    for keys, text in (*_KEYS, *(_REPLAY_KEYS if replay else ())):
        rows += wrap(f"  {keys:<24}{text}", width, indent=26)
    rows += [row(), row(styled(" a character for each rank", "heading"))]
    for state, text in _STATES.items():
        rows.append(
            row(
                "  ",
                Span(GLYPHS[state], state_style(state)),
                f" {state.label:<13}{text}",
            )
        )
    return rows
