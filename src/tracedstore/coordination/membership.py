"""The rank of this process among those that share a store, if it is known.

torch's agents call their barriers without a rank. The rendezvous handler that returned
their store knows it, and records it here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracedstore.common.weak_table import WeakTable
from tracedstore.recording.counters import handle_of


@dataclass(frozen=True, slots=True)
class Membership:
    """The rank of this process among those that share a store.

    Attributes:
        rank: The rank of this process.
        world_size: The number of processes.
        name_of: Returns the name of a rank.
        processes: The host and the process id of each rank, where they are known.
    """

    rank: int
    world_size: int
    name_of: Callable[[int], str]
    processes: Mapping[int, tuple[str, int]] = field(default_factory=dict)


# By handle. Weak, because the address of a store that was freed may be used for another
# one.
_memberships: WeakTable[Membership] = WeakTable()


def record(store: Any, membership: Membership) -> None:
    """Record the rank that this process has on a store."""
    _memberships.set(handle_of(store), membership)


def memberships() -> list[tuple[Any, Membership]]:
    """List the handles of the stores on which this process has a recorded rank."""
    return _memberships.items()


def of(store: Any) -> Membership | None:
    """Return the membership of this process on a store, None if none is recorded."""
    return _memberships.get(handle_of(store))
