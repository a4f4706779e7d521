"""The arrivals at a barrier over time: who came when, who is missing."""

from collections.abc import Mapping

from tracedstore.common.ranges import fold
from tracedstore.common.text import duration
from tracedstore.tools.top.model import Barrier, Model, Rank, State
from tracedstore.tools.top.rows import Row, Span, fit, pad, row, shorten, styled

# More ranks than this are shown by host.
_MAX_RANKS = 48
_LABEL = 20
_TIME = 10
_WAITS, _PARTLY = "━", "─"


def waterfall(model: Model, barrier: Barrier, width: int) -> list[Row]:
    """Return a line for each rank, or for each host of a large job.

    A line begins when the rank arrived and lasts as long as it waits. Missing ranks
    are first, then the latest arrivals.
    """
    hosts = {rank.rank: rank for rank in model.ranks if rank.group == barrier.group}
    rows = _title(model, barrier, width)
    first, end = barrier.first, _end(model, barrier)
    if first is None or end is None:
        rows.append(row(styled("  no times: the store has no ledger", "dim")))
        return rows
    arrived = dict(zip(barrier.ranks, barrier.times, strict=False))
    if not arrived:
        rows.append(row(styled("  its arrivals are too many to be shown", "dim")))
        return rows
    scale = _Scale(first, end, max(10, width - _LABEL - _TIME - 3))
    if len(arrived) + len(barrier.missing_ranks) <= _MAX_RANKS:
        rows += _by_rank(barrier, arrived, hosts, scale)
    else:
        rows += _by_host(barrier, arrived, hosts, scale)
    return rows


class _Scale:
    """Times as columns."""

    def __init__(self, first: float, end: float, width: int) -> None:
        self.first = first
        self.width = width
        self._span = max(end - first, 1e-9)

    def column(self, time: float) -> int:
        share = (time - self.first) / self._span
        return min(self.width - 1, max(0, int(share * (self.width - 1))))

    def bar(self, first: float, last: float, style: str) -> Span:
        """Return a line from the first arrival, thicker from the last one on."""
        start, full = self.column(first), self.column(last)
        text = " " * start + _PARTLY * (full - start) + _WAITS * (self.width - full)
        return Span(text, style)


def _title(model: Model, barrier: Barrier, width: int) -> list[Row]:
    of = "" if barrier.world_size is None else f" of {barrier.world_size:,}"
    if barrier.complete:
        state = "complete"
    elif barrier.abandoned:
        state = "abandoned"
    else:
        state = "in progress"
    text = f"{shorten(barrier.prefix, width // 2)}: {barrier.arrived:,}{of} arrived"
    if barrier.first is not None and barrier.last is not None:
        text += f" within {duration(barrier.last - barrier.first)}"
        if not barrier.complete:
            text += f", the first {duration(model.time - barrier.first)} ago"
    return [row(styled(shorten(f"{text} ({state})", width), "heading"))]


def _end(model: Model, barrier: Barrier) -> float | None:
    if barrier.complete or barrier.abandoned or barrier.last is None:
        return barrier.last
    return max(model.time, barrier.last)


def _by_rank(
    barrier: Barrier,
    arrived: Mapping[int, float],
    hosts: Mapping[int, Rank],
    scale: _Scale,
) -> list[Row]:
    rows = []
    for number in barrier.missing_ranks:
        label = _label(number, hosts)
        style = _style_of(number, hosts)
        rows.append(_line(label, Span(" " * scale.width), "missing", style))
    latest = sorted(arrived.items(), key=lambda one: (-one[1], one[0]))
    for number, time in latest:
        style = "last" if number == barrier.last_rank else "waiting"
        bar = scale.bar(time, time, style)
        rows.append(_line(_label(number, hosts), bar, _after(time, scale), style))
    return rows


def _by_host(
    barrier: Barrier,
    arrived: Mapping[int, float],
    hosts: Mapping[int, Rank],
    scale: _Scale,
) -> list[Row]:
    missing: dict[str, list[int]] = {}
    for number in barrier.missing_ranks:
        missing.setdefault(_host(number, hosts), []).append(number)
    times: dict[str, list[float]] = {}
    for number, time in arrived.items():
        times.setdefault(_host(number, hosts), []).append(time)
    rows = []
    for host, ranks in sorted(missing.items(), key=lambda one: one[1][0]):
        text = f"{host} ({fold(ranks)})"
        style = _style_of(ranks[0], hosts)
        bar = Span(" " * scale.width)
        if host in times:
            bar = scale.bar(min(times[host]), scale.first + 1e18, "waiting")
        rows.append(_line(text, bar, f"{len(ranks):,} missing", style))
    last_host = _host(barrier.last_rank, hosts)
    for host in sorted(times.keys() - missing.keys(), key=lambda h: -max(times[h])):
        earliest, latest = min(times[host]), max(times[host])
        style = "last" if barrier.complete and host == last_host else "waiting"
        bar = scale.bar(earliest, latest, style)
        rows.append(_line(host, bar, _after(latest, scale), style))
    return rows


def _line(label: str, bar: Span, text: str, style: str) -> Row:
    return row(
        Span(" " + fit(label, _LABEL) + " "), bar, styled(pad(f" {text}", 0), style)
    )


def _after(time: float, scale: _Scale) -> str:
    return f"+{duration(time - scale.first)}"


def _host(number: int | None, hosts: Mapping[int, Rank]) -> str:
    rank = None if number is None else hosts.get(number)
    return rank.host if rank is not None and rank.host else "(unknown host)"


def _label(number: int, hosts: Mapping[int, Rank]) -> str:
    rank = hosts.get(number)
    return f"{number} {rank.host}" if rank is not None else f"{number}"


def _style_of(number: int, hosts: Mapping[int, Rank]) -> str:
    rank = hosts.get(number)
    bad = rank is not None and rank.state < State.AWAITED
    return rank.state.name.lower() if bad and rank is not None else "awaited"
