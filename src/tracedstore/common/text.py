"""Texts for people: durations, times, numbers with nouns, and what is cut or replaced.

Ranks are in `common.ranges`. Nothing here imports torch.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

_MILLISECOND = 1e-3
_MINUTE = 60


def printable(text: str) -> str:
    """Replace control characters and lone surrogates; the length stays.

    For texts that are kept, or written to a page or a log.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def escape(text: str) -> str:
    r"""Show characters that a terminal would execute or reorder.

    Control characters, escape sequences, bidirectional marks and lone surrogates in
    keys and host names become Python escapes such as ``\x1b``.
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def shorten(text: str, max_length: int) -> str:
    """Cut a text, and mark that it was cut."""
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def number(value: float) -> str:
    """Return a number with thousands separators."""
    return f"{value:,}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number(count)} {noun}{'' if count == 1 else ending}"


def enumeration(items: Sequence[str]) -> str:
    """Return ``one, two and three``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def duration(seconds: float) -> str:
    """Return ``12 µs``, ``3.4 ms``, ``5.67 s``, ``2 min 5 s`` or ``3 h 4 min``.

    A negative one is 0, because the clocks of two hosts differ.
    """
    # Rounded first: 0.9999 s is a second, and no "1e+03 ms".
    seconds = float(f"{max(0.0, seconds):.3g}") if seconds < _MINUTE else seconds
    if seconds < _MILLISECOND:
        microseconds = round(seconds * 1e6)
        return f"{microseconds} µs" if microseconds else "0 s"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def signed_duration(seconds: float) -> str:
    """Return a duration that may be negative, such as the offset of a clock."""
    return f"-{duration(-seconds)}" if seconds < 0 else duration(seconds)


def timestamp(time: float) -> str:
    """Return a time in UTC with date and milliseconds."""
    return _utc(time).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def clock_time(time: float) -> str:
    """Return the time of day in UTC."""
    return _utc(time).strftime("%H:%M:%S")


def host_port(host: str, port: int | str) -> str:
    """Return ``host:port``; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)
