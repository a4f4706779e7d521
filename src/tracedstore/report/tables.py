"""Tables of HTML."""

from collections.abc import Iterable, Sequence
from typing import Final

from tracedstore.report.formatting import plural, safe

MOST_ROWS: Final = 50


def table(
    name: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
    short: Sequence[int] = (),
) -> str:
    """Write a table; cells are HTML.

    The columns with numbers are set to the right; those and the short ones are not
    broken into lines.
    """
    kinds = dict.fromkeys(short, " class=t") | dict.fromkeys(numbers, " class=n")

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}{kinds.get(column, '')}>{cell}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="wide"><table id="t-{name}"><thead>{row(head, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def more(total: int, shown: int, thing: str) -> str:
    """Say how many are not shown, if any."""
    rest = total - shown
    return (
        f'<p class="note">and {plural(rest, f"more {thing}")}</p>' if rest > 0 else ""
    )


def code(text: object) -> str:
    """Write a key, or another name that is to be copied."""
    return f"<code>{safe(text)}</code>"
