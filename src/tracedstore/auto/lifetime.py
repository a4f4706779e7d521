"""Releases the stores that the patches wrapped, when torch would have freed them.

A wrapper of the Python base stays alive until it is released, because torch's C++ does
not keep its Python object. The job does not close a wrapper that it did not create. One
that stays alive does harm: its server keeps the port, and the next
``init_process_group`` at that port reads the keys of the previous one. So a wrapper
lives as long as the process groups on it, and the PrefixStores that these were created
with. The bare store would be freed at the same time. A native wrapper lives as long as
C++ refers to it.
"""

import itertools
from functools import partial
from typing import Any
from weakref import ref

from torch.distributed import Store

from tracedstore.common.weak_table import WeakTable
from tracedstore.store import TracedStore, is_native, release

# The states of the stores that the patches wrapped. A store that the job wrapped is the
# job's to close.
_owned: WeakTable[None] = WeakTable()
# What keeps an owned wrapper alive: the wrapper, and a weak reference to a process
# group or a PrefixStore that uses it. By a number.
_users: dict[int, tuple[TracedStore, ref[Any]]] = {}
_numbers = itertools.count()


def own(store: TracedStore) -> None:
    """Take over releasing a store."""
    _owned.set(store._traced, None)  # noqa: SLF001 - of this package


def wrapper_of(store: Store) -> TracedStore | None:
    """Return the open wrapper of a bare store that the patches wrapped."""
    for state, _ in _owned.items():  # noqa: PERF102 - no dictionary
        if state.inner is store:
            wrapper: TracedStore | None = state.wrapper()
            return wrapper
    return None


def close_after(store: TracedStore, *users: Any) -> None:
    """Release an owned store when these and all its other users are gone."""
    if not _is_owned(store) or is_native(store):
        return
    for user in users:
        number = next(_numbers)
        # No Python code runs when a user is gone, and so no signal handler, whose
        # exception would be lost there: the callback is a function of C, which takes
        # the reference for the default of ``dict.pop``.
        _users[number] = store, ref(user, partial(_users.pop, number))
    if users:
        release(store)


def close_if_unused(store: TracedStore) -> None:
    """Close an owned store that no process group uses."""
    if _is_owned(store) and all(used is not store for used, _ in _users.values()):
        store.close()


def _is_owned(store: TracedStore) -> bool:
    return store._traced in _owned  # noqa: SLF001 - of this package
