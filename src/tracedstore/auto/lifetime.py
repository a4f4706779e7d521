"""Closes the stores that the patches wrapped, when torch would have freed them.

A wrapper of the Python base stays alive until it is closed, because torch's C++ does
not keep its Python object. The job does not close a wrapper that it did not create. One
that stays open does harm: its server keeps the port, and the next
``init_process_group`` at that port reads the keys of the previous one. So a wrapper is
closed when the last process group on it is gone, and the last PrefixStore that a group
was created with. The bare store would be freed at the same time. For a native wrapper,
closing has no effect.
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.distributed import Store

from tracedstore.core import weak
from tracedstore.core.counters import StoreState
from tracedstore.store import TracedStore

# The states of the stores that the patches wrapped. A store that the job wrapped is the
# job's to close.
_owned: WeakKeyDictionary[StoreState, bool] = WeakKeyDictionary()
# The process groups and PrefixStores that use each of them.
_users: WeakKeyDictionary[StoreState, set[ref[Any]]] = WeakKeyDictionary()


def own(store: TracedStore) -> None:
    """Take over closing a store."""
    _owned[store._traced] = True  # noqa: SLF001 - of this package


def wrapper_of(store: Store) -> TracedStore | None:
    """Return the open wrapper of a bare store that the patches wrapped."""
    for state, _ in weak.items(_owned):
        if state.inner is store:
            wrapper: TracedStore | None = state.wrapper()
            return wrapper
    return None


def close_after(store: TracedStore, *users: Any) -> None:
    """Close an owned store when these and all its other users are gone."""
    state = store._traced  # noqa: SLF001 - of this package
    if state not in _owned:
        return
    remaining = _users.setdefault(state, set())
    weak_store = state.wrapper

    # Bound as a default, because module globals may be None at interpreter shutdown;
    # then nothing needs to be closed.
    def user_gone(user: ref[Any], is_finalizing: Any = sys.is_finalizing) -> None:
        remaining.discard(user)
        unused = weak_store()
        if unused is not None and not remaining and not is_finalizing():
            unused.close()

    remaining.update(ref(user, user_gone) for user in users)


def close_if_unused(store: TracedStore) -> None:
    """Close an owned store that no process group uses."""
    state = store._traced  # noqa: SLF001 - of this package
    if state in _owned and not _users.get(state):
        store.close()
