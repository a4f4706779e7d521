"""Reads and validates single fields of a log event.

The functions raise one of INVALID for a field with a wrong type or value.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from tracedstore.common.ranges import MAX_RANKS

# Every exception that the functions of this module raise.
INVALID: Final = (KeyError, TypeError, ValueError, OverflowError)
NO_RANK: Final = -1

_MAX_TEXT_LENGTH = 512
_MAX_TEXTS = 16
# Seconds since 1970: September 2001 and October 2096.
_MIN_TIMESTAMP, _MAX_TIMESTAMP = 1.0e9, 4.0e9


def timestamp(value: object) -> float:
    """Return seconds since 1970 from such a number or from an ISO 8601 text.

    A text without a time zone is read as UTC.
    """
    if isinstance(value, str):
        parsed = datetime.fromisoformat(value)
        if parsed.tzinfo is None:
            parsed = parsed.replace(tzinfo=UTC)
        seconds = parsed.timestamp()
    else:
        seconds = _number(value)
    if not _MIN_TIMESTAMP < seconds < _MAX_TIMESTAMP:
        raise ValueError("timestamp out of range")
    return seconds


def duration(event: Mapping[str, Any], name: str) -> float:
    """Return a duration in seconds. The field is required."""
    return _number(event[name])


def count(event: Mapping[str, Any], name: str) -> int:
    """Return a count, 0 if the field is absent."""
    value = event.get(name)
    return 0 if value is None else int(_number(value))


def text(event: Mapping[str, Any], name: str) -> str:
    """Return the first 512 characters of a text, "" if the field is absent."""
    value = event.get(name, "")
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value[:_MAX_TEXT_LENGTH]


def texts(event: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the first 16 texts of a list, empty if the field is absent."""
    items = event.get(name, [])
    if not isinstance(items, list):
        raise TypeError(f"{name} is not a list")
    return tuple(text({name: item}, name) for item in items[:_MAX_TEXTS])


def rank(event: Mapping[str, Any], name: str = "rank") -> int:
    """Return a rank, NO_RANK if the field is absent."""
    value = event.get(name)
    return NO_RANK if value is None else _rank(value)


def ranks(event: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a list of ranks, empty if the field is absent."""
    return tuple(map(_rank, event.get(name, ())))


def _rank(value: object) -> int:
    # Not isinstance: True and False are no ranks.
    if type(value) is not int:
        raise TypeError("rank is not an integer")
    if not 0 <= value < MAX_RANKS:
        raise ValueError("rank out of range")
    return value


def _number(value: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError("not a number")
    number = float(value)
    if not (math.isfinite(number) and 0 <= number < _MAX_TIMESTAMP):
        raise ValueError("number out of range")
    return number
