"""Who writes a user's key, learned from keys of the same family."""

from collections.abc import Mapping, Sequence

from tracedstore.common.keys import fold_numbers
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.local.facts import WrittenFamily

# Writers whose rank was a number in their key, from which on that is a rule.
_MIN_WRITERS = 2


def learned_writers(
    keys: Sequence[str], written: Mapping[int, Sequence[WrittenFamily]]
) -> tuple[int, ...]:
    """Return the ranks that write these keys; none if one of them is unknown.

    One rank that wrote all keys of a family writes the next one too. If several ranks
    wrote keys with their own rank in them, the number in a key is the rank that writes
    it.

    Args:
        keys: Keys that do not exist.
        written: The families that each rank wrote. Not all writes are observed: a rank
            that is not listed may have written a family too.
    """
    awaited: set[int] = set()
    for key in keys:
        family, numbers = fold_numbers(key)
        writers = {
            rank: one
            for rank, families in written.items()
            for one in families
            if one.family == family
        }
        writer = _writer(numbers, writers)
        if writer is None:
            return ()
        awaited.add(writer)
    return tuple(sorted(awaited))


def _writer(
    numbers: Sequence[int | None], writers: Mapping[int, WrittenFamily]
) -> int | None:
    if not writers:
        return None
    positions = set.intersection(*(set(one.rank_positions) for one in writers.values()))
    found = {numbers[position] for position in positions if position < len(numbers)}
    if len(writers) < _MIN_WRITERS:
        # A number of its keys was its rank: as a rule, or by chance.
        (writer,) = writers
        return writer if found <= {writer} else None
    number = found.pop() if len(found) == 1 else None
    return number if number is not None and number < MAX_RANKS else None
