"""Let a store that we wrapped for torch live as long as torch would have kept it.

A wrapper stays alive until it is closed, because torch's C++ cannot keep its Python
half. Nobody knows to close one that was made behind their back; and one that stays is
not harmless: its server keeps the port, and the next ``init_process_group`` at that
port finds the keys of the last one. So it is closed when the last process group on
it, and the last PrefixStore that a group was given, are gone, as the bare store would
go then.
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from tracedstore.store import TracedStore

# Those that we wrapped: what the job wrapped is the job's to close.
_ours: WeakSet[TracedStore] = WeakSet()
# Who uses them.
_users: WeakKeyDictionary[TracedStore, set[ref[Any]]] = WeakKeyDictionary()


def adopt(store: TracedStore) -> None:
    """Take it on us to close a store."""
    _ours.add(store)


def close_after(store: TracedStore, *users: Any) -> None:
    """Close a store of ours when these and all other users of it are gone."""
    if store not in _ours:
        return
    left = _users.setdefault(store, set())
    whose = ref(store)

    # Modules are taken apart at the end, and then there is nothing to be closed.
    def gone(user: ref[Any], ending: Any = sys.is_finalizing) -> None:
        left.discard(user)
        unused = whose()
        if unused is not None and not left and not ending():
            unused.close()

    left.update(ref(user, gone) for user in users)


def close_if_unused(store: TracedStore) -> None:
    """Close a store of ours that no process group came to use."""
    if store in _ours and not _users.get(store):
        store.close()
