"""Fields of events, held to what the schema says of them.

Each raises KeyError, TypeError or ValueError for a field that does not fit.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from tracedstore.coordination.ranges import MAX_RANKS

# What the errors of these functions are.
UNFIT: Final = (KeyError, TypeError, ValueError, OverflowError)
NOBODY: Final = -1

_LONGEST_TEXT = 512
# Before these dates nobody traced a store, and after them nobody will with this.
_FIRST, _LAST = 1.0e9, 4.0e9


def moment(written: object) -> float:
    """Read a time: ISO 8601, in UTC where it does not say, or seconds since 1970."""
    if isinstance(written, str):
        when = datetime.fromisoformat(written)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        seconds = when.timestamp()
    else:
        seconds = _number(written)
    if not _FIRST < seconds < _LAST:
        raise ValueError("out of this world")
    return seconds


def seconds(event: Mapping[str, Any], name: str) -> float:
    """Read a duration."""
    return _number(event[name])


def count(event: Mapping[str, Any], name: str) -> int:
    """Read a number of things; 0 where it is not there."""
    found = event.get(name)
    return 0 if found is None else int(_number(found))


def text(event: Mapping[str, Any], name: str) -> str:
    """Read a text; "" where it is not there."""
    found = event.get(name, "")
    if not isinstance(found, str):
        raise TypeError(name)
    return found[:_LONGEST_TEXT]


def rank(event: Mapping[str, Any], name: str = "rank") -> int:
    """Read a rank; NOBODY where it is not there."""
    found = event.get(name)
    return NOBODY if found is None else _rank(found)


def ranks(event: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Read a list of ranks; none where it is not there."""
    return tuple(map(_rank, event.get(name, ())))


def _rank(found: object) -> int:
    if type(found) is not int:
        raise TypeError("a rank is an integer")
    if not 0 <= found < MAX_RANKS:
        raise ValueError("no rank is that high")
    return found


def _number(found: object) -> float:
    if type(found) is not float and type(found) is not int:
        raise TypeError("not a number")
    number = float(found)
    if not (math.isfinite(number) and 0 <= number < _LAST):
        raise ValueError("not a number of anything")
    return number
