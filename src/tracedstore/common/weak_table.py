"""A table whose keys are not kept alive, and whose entries need no callback.

The callbacks of `weakref.WeakKeyDictionary` are Python code, which runs where the last
reference to a key is dropped: in the main thread, inside ``destroy_process_group`` for
example. A signal handler may run there as well. What it raises is then printed as
"Exception ignored in ..." and lost. So a `WeakTable` finds entries of dead keys when it
is used, and drops them.
"""

from typing import Any, Generic, TypeVar
from weakref import ref

V = TypeVar("V")

_MIN_LIMIT = 16


class WeakTable(Generic[V]):
    """Values by the identity of objects, which must support weak references.

    Every method is safe while other threads change the table.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Any], V]] = {}
        # Number of entries from which on dead ones are looked for.
        self._limit = _MIN_LIMIT

    def __contains__(self, key: Any) -> bool:
        """Return whether a key has a value."""
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def get(self, key: Any) -> V | None:
        """Return the value of a key; None if it has none."""
        entry = self._entries.get(id(key))
        # Another object may have the address of a dead key.
        return None if entry is None or entry[0]() is not key else entry[1]

    def set(self, key: Any, value: V) -> None:
        """Set the value of a key.

        Raises:
            TypeError: The key does not support weak references.
        """
        self._make_room()
        self._entries[id(key)] = (ref(key), value)

    def setdefault(self, key: Any, default: V) -> V:
        """Return the value of a key, after setting it if the key has none.

        Raises:
            TypeError: The key does not support weak references.
        """
        self._make_room()
        entry = self._entries.get(id(key))
        if entry is not None and entry[0]() is not key:
            self._drop(id(key), entry)
        # Atomic: two threads that set one together get the same.
        return self._entries.setdefault(id(key), (ref(key), default))[1]

    def __len__(self) -> int:
        """Return the number of keys that are alive."""
        return len(self.items())

    def items(self) -> list[tuple[Any, V]]:
        """Return the keys that are alive, with their values."""
        self.drop_dead()
        # A copy of the dictionary is one step of C; a list of its items is not.
        found = [(key(), value) for key, value in self._entries.copy().values()]
        return [(key, value) for key, value in found if key is not None]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()

    def drop_dead(self) -> None:
        """Drop the values of keys that are dead."""
        for identity, entry in self._entries.copy().items():
            if entry[0]() is None:
                self._drop(identity, entry)

    def _drop(self, identity: int, entry: tuple[ref[Any], V]) -> None:
        # Another thread may have set the value of a new key at this address.
        if self._entries.get(identity) is entry:
            self._entries.pop(identity, None)

    def _make_room(self) -> None:
        if len(self._entries) >= self._limit:
            self.drop_dead()
            self._limit = max(_MIN_LIMIT, 2 * len(self._entries))
