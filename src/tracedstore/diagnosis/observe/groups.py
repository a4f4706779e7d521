"""The members of the process groups that this process creates, by the group's name.

Keys of a group contain group ranks. The caller of `members` translates them to global
ranks. A group is recorded before torch creates it, so that its members are known while
its creation blocks.
"""

import threading
from collections.abc import Sequence
from typing import Final

# The latest groups are kept: a job creates a few dozen, each with a new name.
MAX_GROUPS: Final = 1024

_members: dict[str, tuple[int, ...]] = {}
_lock = threading.RLock()


def record(name: str, global_ranks: Sequence[int], world_size: int) -> None:
    """Record the members of a group.

    Args:
        name: The name that torch has for the group.
        global_ranks: The global rank of each group rank; empty for the default group,
            which has all ranks.
        world_size: The number of members.

    A later group with the same name replaces the earlier one: torch reuses names after
    ``destroy_process_group``.
    """
    ranks = tuple(global_ranks) or tuple(range(world_size))
    if not ranks:
        return  # MPI assigns the ranks later
    with _lock:
        _members.pop(name, None)
        _members[name] = ranks
        if len(_members) > MAX_GROUPS:
            del _members[next(iter(_members))]


def members(name: str) -> tuple[int, ...] | None:
    """Return the global rank of each group rank; None if the group is unknown."""
    return _members.get(name)


def reset() -> None:
    """Forget all groups, as a forked child must."""
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it
    _lock = threading.RLock()
    _members.clear()
