"""Keys as telemetry shows them: printable, short, and folded into families.

Keys are unbounded (ranks, generations, uuids), so a key never becomes a label. The
*family* of a key has its variable parts folded; a process has at most 64 of them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

OTHER_FAMILIES = "other"
MAX_FAMILIES = 64
MAX_KEYS_SHOWN = 16
# What is in every key of this package, below whatever prefixes.
OWN_KEYS = "tracedstore/"
_MAX_KEY_LENGTH = 256
_MAX_DIGITS = 18

# A uuid, a run of eight or more hex digits with at least one decimal digit among
# them (ids, hashes; not the word "deadbeef"), or a number.
_VARIABLE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?<![0-9a-z])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9a-z])"
    r"|[0-9]+",
    re.IGNORECASE,
)


def key_text(key: Any) -> str:
    """Return a key as text for a log line or a span: bounded, always encodable."""
    if isinstance(key, bytes):
        text = key[: _MAX_KEY_LENGTH + 1].decode("utf-8", "backslashreplace")
    elif isinstance(key, str):
        text = key[: _MAX_KEY_LENGTH + 1].encode("utf-8", "backslashreplace").decode()
    else:
        # The store raises for it, and it might be a value.
        text = f"<{type(key).__name__}>"
    return text if len(text) <= _MAX_KEY_LENGTH else text[: _MAX_KEY_LENGTH - 1] + "…"


def fold(key: str) -> str:
    """Replace the variable parts of a key: ``pg/0//worker/3`` -> ``pg/*//worker/*``."""
    return _VARIABLE.sub("*", key)


def fold_numbers(key: str) -> tuple[str, list[int | None]]:
    """Return the family of a key, and the number at each variable part of it.

    The number is None for a part that is no decimal number, such as a uuid.
    """
    parts = _VARIABLE.findall(key)
    # Ranks have few digits; int() takes the square of the length.
    numbers = [
        int(part) if len(part) <= _MAX_DIGITS and part.isdecimal() else None
        for part in parts
    ]
    return fold(key), numbers


def replace_number(key: str, position: int, number: int) -> str:
    """Return a key with another number at one of its variable parts.

    The number has at least as many digits as the one before, as in ``rank_03``.
    """
    part = list(_VARIABLE.finditer(key))[position]
    digits = str(number).zfill(len(part[0]) if part[0].startswith("0") else 0)
    return key[: part.start()] + digits + key[part.end() :]


class KeyFamilies:
    """The key families of a process, at most 64; further ones are ``other``."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, key: str) -> str:
        """Return the family of a printable key."""
        family = fold(key)
        if family in self._known:
            return family
        # Two threads may both pass this test: one family too many does no harm.
        if len(self._known) >= MAX_FAMILIES:
            return OTHER_FAMILIES
        self._known.add(family)
        return family

    def of_all(self, keys: Sequence[str]) -> str:
        """Return the family that all keys share, or "" where they share none."""
        families = {self.of(key) for key in keys}
        return families.pop() if len(families) == 1 else ""

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._known.clear()


def shown(keys: Iterable[Any]) -> tuple[str, ...]:
    """Return the first keys of a call, printable."""
    printables: list[str] = []
    for key in keys:
        if len(printables) == MAX_KEYS_SHOWN:
            break
        printables.append(key_text(key))
    return tuple(printables)
