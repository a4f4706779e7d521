"""What stood in a store at one time, read without a trace and without waiting."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from tracedstore.coordination.arrivals import etcd_items, list_keys
from tracedstore.core.errors import CommandError

# Values to a request, and seconds for one: a key that was deleted after it was listed
# is waited for.
_AT_ONCE = 1024
_PATIENCE = 1.0


class StoreSnapshot:
    """To be read as a store is, by those that only read.

    A key that is not there is a KeyError instead of a wait.

    Attributes:
        keys: All the keys there were.
        beside: What torch's etcd-v2 keeps of rendezvous beside its store, by run id.
    """

    def __init__(
        self,
        keys: Iterable[str],
        values: dict[str, bytes],
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self.keys = frozenset(keys)
        self._values = values
        self.beside = beside or {}

    @classmethod
    def of(
        cls,
        store: Any,
        wanted: Callable[[Sequence[str]], list[str]],
        answered: Callable[[], None] = lambda: None,
    ) -> "StoreSnapshot":
        """Take one, with the values of those of the keys that are wanted.

        Args:
            store: Of what.
            wanted: Chooses them.
            answered: Is called after each answer of the store's.
        """
        contents = etcd_items(store)
        if contents is not None:
            answered()
            return cls(contents, contents, _beside(store))
        keys = _listed(store)
        answered()
        store.set_timeout(timedelta(seconds=_PATIENCE))
        values: dict[str, bytes] = {}
        chosen = wanted(keys)
        left = iter(chosen)
        while some := list(islice(left, _AT_ONCE)):
            values |= _values_of(store, some, answered)
            answered()
        gone = set(chosen) - values.keys()
        return cls(set(keys) - gone, values)

    def list_keys(self) -> list[str]:
        """List the keys that have their values here."""
        return list(self._values)

    def get(self, key: str) -> bytes:
        """Read a value."""
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these were there."""
        return self.keys.issuperset(keys)

    def add(self, key: str, _nothing: int) -> int:
        """Read a number, as those do who add nothing to it."""
        return int(self._values[key])

    @staticmethod
    def has_extended_api() -> bool:
        """Nothing can be appended here, and nothing swapped."""
        return False


def _listed(store: Any) -> list[str]:
    try:
        return sorted(list_keys(store))
    except (AttributeError, NotImplementedError):
        raise CommandError(
            "the torch installed here is too old to list the keys of a store; use the"
            " one that the job has"
        ) from None
    except DistNetworkError:
        raise CommandError(
            "the store hung up when it was asked for its keys: the job has just ended,"
            " or its torch is too old to list them"
        ) from None


def _values_of(
    store: Any, keys: list[str], answered: Callable[[], None]
) -> dict[str, bytes]:
    try:
        return dict(zip(keys, store.multi_get(keys), strict=True))
    except (DistStoreError, RuntimeError):
        # Somebody deleted one meanwhile. A second time is for the next look.
        still = []
        for key in keys:
            if store.check([key]):
                still.append(key)
            answered()
        return dict(zip(still, store.multi_get(still), strict=True)) if still else {}


def _beside(store: Any) -> dict[str, bytes]:
    if not str(getattr(store, "prefix", "")).startswith("/torch/elastic/"):
        return {}
    folder = "/torch/elastic/rendezvous"
    try:
        nodes = store.client.get(folder).children
    except Exception:  # there is none, and the store has been read
        return {}
    return {
        str(node.key).removeprefix(f"{folder}/"): str(node.value).encode()
        for node in nodes
        if not node.dir
    }
