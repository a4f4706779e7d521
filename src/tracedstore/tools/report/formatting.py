"""Formats numbers, times and ranks as text."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from tracedstore.common.ranges import fold

_MILLISECOND = 1e-3
_MINUTE = 60.0
_HOUR = 3600.0


def printable(text: str) -> str:
    """Replace control characters and lone surrogates, which logs may contain."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def number(value: float) -> str:
    """Format a number with thousands separators."""
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Format as ``12 µs``, ``3.4 ms``, ``5.67 s``, ``2 min 5 s`` or ``3 h 4 min``."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < _MILLISECOND:
        microseconds = round(seconds * 1e6)
        return f"{microseconds} µs" if microseconds else "0"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < 2 * _HOUR:
        return f"{seconds // _MINUTE:.0f} min {seconds % _MINUTE:.0f} s"
    return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"


def timestamp(time: float) -> str:
    """Format a time in UTC with date and milliseconds."""
    return _utc(time).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def clock_time(time: float) -> str:
    """Format the time of day in UTC."""
    return _utc(time).strftime("%H:%M:%S")


def ranks(items: Iterable[int], max_length: int = 300) -> str:
    """Format as ``rank 3`` or ``ranks 1,4-5``. A long list is truncated."""
    distinct = sorted(set(items))
    if not distinct:
        return "no rank"
    text = fold(distinct)
    if len(text) > max_length:
        text = text[:max_length].rpartition(",")[0] + ", ..."
    return f"rank {text}" if len(distinct) == 1 else f"ranks {text}"


def enumeration(items: Sequence[str]) -> str:
    """Format as ``one, two and three``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Format as ``1 rank`` or ``2 ranks``."""
    return f"{number(count)} {noun}{'' if count == 1 else ending}"


def shorten(text: str, max_length: int) -> str:
    """Cut a text, and mark that it was cut."""
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)
