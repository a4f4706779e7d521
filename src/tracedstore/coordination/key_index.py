"""The key index: the names of keys in a store that cannot list them.

Stores list their keys from torch 2.10 on. With an older torch, ranks append the names
of the keys that `status` reads to one key under the prefix of their store.
"""

import json
from collections.abc import Iterator
from typing import Any

from tracedstore.coordination import validation
from tracedstore.coordination.connections import bare_store

INDEX = "tracedstore/KEYS"
# Maximum size of an index that is read; 100,000 barriers have about 3 MB.
_MAX_INDEX_BYTES = 16 * 1024 * 1024
_MAX_ENTRY_BYTES = 8 * 1024


def record_keys(store: Any, *keys: str) -> None:
    """Add keys to the index, unless the store can list its keys."""
    bare = bare_store(store)
    if hasattr(bare, "list_keys") or type(bare).__name__ == "EtcdStore":
        return
    # Below the wrapper, where the call is not recorded: a job did not make it. One
    # append for all: a TCPStore sends no reply to it.
    state = getattr(store, "_traced", None)
    bare = store if state is None else state.inner
    append_keys(bare, INDEX, *keys)


def append_keys(store: Any, index: str, *keys: str) -> None:
    """Add keys to an index."""
    store.append(index, "".join(f"{json.dumps(key)}\n" for key in keys))


def read_index(value: bytes) -> Iterator[str]:
    """Return the keys in the value of an index; malformed entries are omitted."""
    for line in value[-_MAX_INDEX_BYTES:].splitlines():
        try:
            key = validation.text(validation.load_json(line, _MAX_ENTRY_BYTES))
            key.encode()  # raises ValueError for half of a surrogate pair
            yield key
        except (ValueError, TypeError):
            continue
