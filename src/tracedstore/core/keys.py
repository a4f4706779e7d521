"""Keys as telemetry shows them: printable, short, and folded into families.

A key is unbounded (ranks, generations, uuids), so it never becomes a label. Its
*family* has the variable parts folded away, and a process has at most 64 of them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

OTHER_FAMILIES = "other"
MOST_FAMILIES = 64
MOST_KEYS_SHOWN = 16
_LONGEST_KEY = 256

# A uuid, a run of eight or more hex digits with at least one decimal digit among
# them (ids, hashes; not the word "deadbeef"), or a number.
_VARIABLE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?<![0-9a-z])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9a-z])"
    r"|[0-9]+",
    re.IGNORECASE,
)


def printable(key: Any) -> str:
    """Show a key in a log line or a span: text, bounded, never undecodable."""
    if isinstance(key, bytes):
        text = key[: _LONGEST_KEY + 1].decode("utf-8", "backslashreplace")
    elif isinstance(key, str):
        text = key[: _LONGEST_KEY + 1].encode("utf-8", "backslashreplace").decode()
    else:
        # Whatever it is, the store will refuse it, and it might be a value.
        text = f"<{type(key).__name__}>"
    return text if len(text) <= _LONGEST_KEY else text[: _LONGEST_KEY - 1] + "…"


def fold(key: str) -> str:
    """Replace the variable parts of a key: ``pg/0//worker/3`` -> ``pg/*//worker/*``."""
    return _VARIABLE.sub("*", key)


class KeyFamilies:
    """The key families a process has met, at most 64; later ones are ``other``."""

    def __init__(self, most: int = MOST_FAMILIES) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, key: str) -> str:
        """Give the family of a printable key."""
        family = fold(key)
        if family in self._known:
            return family
        # Two threads may both pass this test: one family too many is no harm.
        if len(self._known) >= self._most:
            return OTHER_FAMILIES
        self._known.add(family)
        return family

    def of_all(self, keys: Sequence[str]) -> str:
        """Give the family that all the keys share, or "" where they share none."""
        families = {self.of(key) for key in keys}
        return families.pop() if len(families) == 1 else ""

    def reset(self) -> None:
        """Start anew, as a forked child does."""
        self._known.clear()


def shown(keys: Iterable[Any]) -> tuple[str, ...]:
    """Make the first keys of a call printable."""
    printables: list[str] = []
    for key in keys:
        if len(printables) == MOST_KEYS_SHOWN:
            break
        printables.append(printable(key))
    return tuple(printables)
