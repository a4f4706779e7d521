"""Who reports what many processes find.

Every rank of a job finds the same stall at about the same time. If all of them looked
closer, ten thousand would overload the store, and the log would have one sentence ten
thousand times. There are three ways to agree, by what the processes share:

- A store: they count themselves in a key (`take_position`), and the first ones report.
- A list that all of them know, such as the nodes of a rendezvous: its first members
  report (`first_of`), without a request.
- Nothing but the host, because the store cannot be reached: a lock of the kernel
  decides (`stall_reports.claim`). The first local rank may not be affected.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, Final, TypeVar

T = TypeVar("T")

# How many report, where one may die or lose the store before it has.
REPORTERS: Final = 2


def take_position(store: Any, key: str) -> int:
    """Count this process among those that found something; return its position, from 1.

    Args:
        store: The store that they share.
        key: The counter. It names what was found, and the attempt or the round.
    """
    position: int = store.add(key, 1)
    return position


def is_elected(position: int, reporters: int = REPORTERS) -> bool:
    """Return whether a process with this position reports; 0 is an unknown position."""
    return 0 < position <= reporters


def first_of(
    members: Iterable[T], *, without: Collection[T] = (), reporters: int = REPORTERS
) -> list[T]:
    """Return the members that report: the first ones that are able to.

    Args:
        members: All members, in an order that each of them knows.
        without: Those that may not run, because they are what is reported.
        reporters: How many report.
    """
    able = (member for member in members if member not in without)
    return list(islice(able, reporters))
