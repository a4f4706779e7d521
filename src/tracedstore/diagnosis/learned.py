"""Who writes a user's key, learned from keys of the same family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracedstore.coordination.ranges import MAX_RANKS
from tracedstore.core.keys import fold_numbers
from tracedstore.diagnosis.process_answer import WrittenFamily

# Writers whose rank was a number in their key, from which on that is a rule.
_MIN_WRITERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWriters:
    """The ranks that write keys, as learned.

    Attributes:
        awaited: The ranks that certainly write the keys; empty if that is unknown.
        candidates: The ranks that wrote keys of their families; empty without any.
    """

    awaited: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()


def learned_writers(
    keys: Sequence[str], written: Mapping[int, Sequence[WrittenFamily]]
) -> LearnedWriters:
    """Return who writes these keys.

    One rank that wrote all keys of a family writes the next one too. If several ranks
    wrote keys with their own rank in them, the number in a key is the rank that writes
    it.

    Args:
        keys: Keys that do not exist.
        written: The families that each rank wrote.
    """
    awaited: set[int] = set()
    candidates: set[int] = set()
    certain = True
    for key in keys:
        family, numbers = fold_numbers(key)
        writers = {
            rank: one
            for rank, families in written.items()
            for one in families
            if one.family == family
        }
        candidates.update(writers)
        writer = _writer(numbers, writers)
        if writer is None:
            certain = False
        else:
            awaited.add(writer)
    if not certain:
        return LearnedWriters(candidates=tuple(sorted(candidates)))
    return LearnedWriters(awaited=tuple(sorted(awaited)))


def _writer(
    numbers: Sequence[int | None], writers: Mapping[int, WrittenFamily]
) -> int | None:
    if not writers:
        return None
    positions = set.intersection(*(set(one.rank_positions) for one in writers.values()))
    if not positions:
        return next(iter(writers)) if len(writers) == 1 else None
    if len(writers) < _MIN_WRITERS:
        return None  # one rank may have written its rank by chance
    found = {numbers[position] for position in positions if position < len(numbers)}
    number = found.pop() if len(found) == 1 else None
    return number if number is not None and number < MAX_RANKS else None
