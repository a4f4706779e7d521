"""Many ranks in few words: folded into ranges, grouped by host."""

import re
from collections.abc import Iterable, Sequence

from tracedstore.coordination.decoders import Decoder, name_of, nameless

MOST_RANKS = 1_000_000
# Every second rank of a large job would otherwise make a log line of 300 kB.
_MOST_RANGES_SHOWN = 32
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def fold(ranks: Iterable[int]) -> str:
    """Write ranks as ranges, sorted and each once: ``0-2,5,7-8``."""
    return ",".join(map(_written, _ranges(ranks)))


def unfold(text: str) -> list[int]:
    """Read what ``fold`` wrote.

    Anything else, or more than a million ranks, is a ValueError before it is expanded.
    """
    ranges: list[range] = []
    total = 0
    for item in text.split(",") if text else ():
        found = _RANGE.fullmatch(item)
        if not found:
            raise ValueError(f"{item[:40]!r} is not a rank or a range of ranks")
        ranks = range(int(found[1]), int(found[2] or found[1]) + 1)
        if not ranks:
            raise ValueError(f"{item!r} runs backwards")
        # By its bounds: len() of a range beyond sys.maxsize is an OverflowError.
        total += ranks.stop - ranks.start
        if total > MOST_RANKS:
            raise ValueError(f"more than {MOST_RANKS} ranks")
        ranges.append(ranks)
    return sorted({rank for ranks in ranges for rank in ranks})


def by_host(ranks: Iterable[int], decoder: Decoder) -> dict[str, list[int]]:
    """Group ranks by their names, in order of each name's first rank."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        hosts.setdefault(name_of(decoder, rank), []).append(rank)
    return hosts


def describe(
    ranks: Iterable[int], total: int, decoder: Decoder, most_hosts: int = 16
) -> str:
    """Say who is missing, as an operator wants to read it.

    ``missing 9 of 64: node1 (ranks 8-15), rank 40``: hosts first, then the ranks of
    which no host is known. However many there are, the text stays a few lines long.
    """
    groups = by_host(ranks, decoder)
    missing = sum(map(len, groups.values()))
    homeless = [
        group[0]
        for name, group in groups.items()
        if len(group) == 1 and name == nameless(group[0])
    ]
    for rank in homeless:
        del groups[nameless(rank)]
    hosts = [f"{host} ({_brief(group)})" for host, group in groups.items()]
    parts = hosts[:most_hosts]
    if rest := len(hosts) - len(parts):
        parts.append(f"... and {rest} more host{'s' if rest > 1 else ''}")
    if homeless:
        parts.append(_brief(homeless))
    return f"missing {missing} of {total}" + (f": {', '.join(parts)}" if parts else "")


def _ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return ranges


def _written(bounds: tuple[int, int]) -> str:
    first, last = bounds
    return str(first) if first == last else f"{first}-{last}"


def _brief(ranks: Sequence[int]) -> str:
    """Write ``rank 3`` or ``ranks 1,4-5``, and of very many only the first."""
    ranges = _ranges(ranks)
    shown = ranges[:_MOST_RANGES_SHOWN]
    text = ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(_written, shown))
    rest = len(ranks) - sum(last - first + 1 for first, last in shown)
    return f"{text},... and {rest} more" if rest else text
