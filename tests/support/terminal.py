"""The lines on a terminal, from output with the escape sequences that rich writes."""

import re
from collections.abc import Iterator

_TOKEN = re.compile(r"(\r|\n|\x1b\[2K|\x1b\[1A)")
_STYLE = re.compile(r"\x1b\[[\d;]*m")


def frames(output: str) -> Iterator[list[str]]:
    """Yield the lines before each redraw, and the lines at the end.

    Lines that have left the top of the screen are included, and styles are kept.
    """
    lines, row = [""], 0
    for token in _TOKEN.split(output.replace("\r\n", "\n")):
        if token == "\r":
            yield lines.copy()
        elif token == "\n":
            row += 1
            lines[row:] = lines[row:] or [""]
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            # rich erases a view from its last line up.
            lines[row:] = [""]
        else:
            lines[row] += token
    yield lines


def without_styles(text: str) -> str:
    """Remove colours and other styles."""
    return _STYLE.sub("", text)
