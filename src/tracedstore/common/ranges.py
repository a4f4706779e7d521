"""Short texts for many ranks, folded into ranges."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

MAX_RANKS = 1_000_000
# Without a limit, every second rank of a large job makes a log line of 300 kB.
_MAX_RANGES_SHOWN = 32
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def fold(ranks: Iterable[int]) -> str:
    """Fold ranks into ranges, sorted and without duplicates: ``0-2,5,7-8``."""
    return ",".join(map(_range_text, _to_ranges(ranks)))


def unfold(text: str, max_ranks: int = MAX_RANKS) -> list[int]:
    """Expand the text that ``fold`` returned.

    Raises:
        ValueError: The text is malformed or has more than `max_ranks` ranks. It is
            raised before anything is expanded.
    """
    return list(unfold_shared(text, max_ranks))


@lru_cache(maxsize=4)
def unfold_shared(text: str, max_ranks: int = MAX_RANKS) -> tuple[int, ...]:
    """Expand a text as `unfold` does; the same object for the same text.

    All ranks of a group publish the same text, and a million ranks take 40 MB.
    """
    return _expand(_parse(text), max_ranks)


def unfold_all_below(text: str, below: int) -> tuple[int, ...]:
    """Expand a text as `unfold_shared` does.

    Raises:
        ValueError: The text is malformed, or has a rank from a limit on.
    """
    ranks = unfold_shared(text, below)
    if ranks and ranks[-1] >= below:
        raise ValueError(f"a rank from {below}")
    return ranks


def unfold_below(text: str, below: int) -> tuple[int, ...]:
    """Expand the ranks of a text that are lower than a limit.

    The others cost nothing: any client of a store can write ``0-999999``.

    Raises:
        ValueError: The text is malformed, has a rank from `MAX_RANKS`, or more ranges
            than there are ranks. It is raised before anything is expanded.
    """
    if text.count(",") >= below:
        raise ValueError(f"more than {below} ranges")
    parsed = list(_parse(text))
    if any(ranks.stop > MAX_RANKS for ranks in parsed):
        raise ValueError(f"a rank from {MAX_RANKS}")
    clipped = (range(ranks.start, min(ranks.stop, below)) for ranks in parsed)
    return _expand((ranks for ranks in clipped if ranks), below)


def _parse(text: str) -> Iterator[range]:
    for item in text.split(",") if text else ():
        match = _RANGE.fullmatch(item)
        if not match:
            raise ValueError(f"{item[:40]!r} is not a rank or a range of ranks")
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not ranks:
            raise ValueError(f"{item!r} is a descending range")
        yield ranks


def _expand(ranges: Iterable[range], max_ranks: int) -> tuple[int, ...]:
    accepted: list[range] = []
    total = 0
    for ranks in ranges:
        # From the bounds: len() of a range beyond sys.maxsize is an OverflowError.
        total += ranks.stop - ranks.start
        if total > max_ranks:
            raise ValueError(f"more than {max_ranks} ranks")
        accepted.append(ranks)
    return tuple(sorted({rank for ranks in accepted for rank in ranks}))


def _to_ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return ranges


def _range_text(bounds: tuple[int, int]) -> str:
    first, last = bounds
    return str(first) if first == last else f"{first}-{last}"


def ranks_text(
    ranks: Iterable[int], noun: str = "rank", max_ranges: int = _MAX_RANGES_SHOWN
) -> str:
    """Return ``rank 3`` or ``ranks 1,4-5``, cut after some ranges."""
    distinct = set(ranks)
    if not distinct:
        return f"no {noun}"
    ranges = _to_ranges(distinct)
    shown = ranges[:max_ranges]
    text = f"{noun if len(distinct) == 1 else f'{noun}s'} "
    text += ",".join(map(_range_text, shown))
    rest = len(distinct) - sum(last - first + 1 for first, last in shown)
    return f"{text},... and {rest} more" if rest else text
