"""Which rank this process has among those that share a store, where that is known.

torch's agents come to their barriers without saying who they are; whoever gave them
the store knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of this process among those that share a store.

    Attributes:
        rank: Which it is.
        world_size: How many there are.
        name_of: Names any of them.
    """

    rank: int
    world_size: int
    name_of: Callable[[int], str]


# Weak: a store that is gone needs no entry, and its address may be another's.
_places: WeakKeyDictionary[Any, Membership] = WeakKeyDictionary()


def record(store: Any, place: Membership) -> None:
    """Say which place this process has on a store."""
    _places[store] = place


def of(store: Any) -> Membership | None:
    """Give the place of this process on a store, where somebody said."""
    try:
        return _places.get(store)
    except TypeError:  # somebody's own store, which cannot be referred to weakly
        return None
