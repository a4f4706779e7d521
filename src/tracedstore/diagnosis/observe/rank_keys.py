"""Users' keys of which every rank writes one, with its rank in it."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from tracedstore.common.keys import fold_numbers, replace_number
from tracedstore.coordination.arrivals import absent_keys

# Maximum number of variable parts of a key that are tried as the rank.
_MAX_POSITIONS: Final = 4
# Ranks whose own key exists, from which on that is no coincidence.
_MIN_PRESENT: Final = 2


def awaited_in(
    keys: Sequence[str], absent: Sequence[str], world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks that write the absent keys of one call; None if unknown.

    They are known if the call waits for one key of each rank.

    Args:
        keys: The keys that the call waits for.
        absent: Those that do not exist.
        world_size: The number of ranks.
    """
    if len(keys) != world_size or world_size < _MIN_PRESENT:
        return None
    folded = [fold_numbers(key) for key in keys]
    if len({family for family, _ in folded}) > 1:
        return None
    columns = list(zip(*(numbers for _, numbers in folded), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) != 1 or set(varying[0]) != set(range(world_size)):
        return None
    rank_of = dict(zip(keys, varying[0], strict=True))
    return tuple(sorted(rank for key in absent if (rank := rank_of[key]) is not None))


def find_awaited(
    connection: Any, key: str, blocked: Collection[int], world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks that have not written their key of a family; None if unknown.

    A number in the key is the rank if the keys of all blocked ranks exist, and those of
    all others do not.

    Args:
        connection: A connection to the store of the key.
        key: A key that does not exist.
        blocked: The blocked ranks.
        world_size: The number of ranks.
    """
    others = [rank for rank in range(world_size) if rank not in blocked]
    # Keys 0, 1 and 2 of which the next one does not exist may be counted, no matter who
    # writes them.
    if len(blocked) < _MIN_PRESENT or not others or max(blocked) < others[0]:
        return None
    _, numbers = fold_numbers(key)
    for position, number in enumerate(numbers[:_MAX_POSITIONS]):
        if number not in others:
            continue
        keys = [replace_number(key, position, rank) for rank in range(world_size)]
        own = [keys[rank] for rank in sorted(blocked)]
        if absent_keys(connection, own):
            continue
        absent = absent_keys(connection, [keys[rank] for rank in others])
        if len(absent) == len(others):
            return tuple(others)
    return None
