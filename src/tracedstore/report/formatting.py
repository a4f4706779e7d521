"""Numbers, times and ranks as a page shows them, safe to put into HTML."""

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from tracedstore.coordination.ranges import fold

_MILLISECOND = 1e-3
_MINUTE = 60.0
_HOUR = 3600.0


def safe(text: object) -> str:
    """Write anything that came out of a log: it is text, whatever it looks like."""
    shown = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)
    )
    return html.escape(shown)


def number(value: float) -> str:
    """Write a count, in groups of three."""
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Write ``12 µs``, ``3.4 ms``, ``5.67 s``, ``2 min 5 s`` or ``3 h 4 min``."""
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


def moment(when: float) -> str:
    """Write a time in UTC, to the millisecond."""
    return _utc(when).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def clock_time(when: float) -> str:
    """Write the time of the day."""
    return _utc(when).strftime("%H:%M:%S")


def ranks(who: Iterable[int], longest: int = 300) -> str:
    """Write ``rank 3``, or ``ranks 1,4-5``; of very many, the first."""
    each_once = sorted(set(who))
    if not each_once:
        return "nobody"
    text = fold(each_once)
    if len(text) > longest:
        text = text[:longest].rpartition(",")[0] + ", ..."
    return f"rank {text}" if len(each_once) == 1 else f"ranks {text}"


def listed(things: Sequence[str]) -> str:
    """Write ``one, two and three``."""
    *first, last = things
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, thing: str, ending: str = "s") -> str:
    """Write ``1 rank`` or ``2 ranks``."""
    return f"{number(count)} {thing}{'' if count == 1 else ending}"


def _utc(when: float) -> datetime:
    return datetime.fromtimestamp(when, UTC)
