"""The key index: the names of keys in a store that cannot list them.

Stores list their keys from torch 2.10 on. With an older torch, ranks append the names
of the keys that `status` reads to one key under the prefix of their store.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from tracedstore.common import validation
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.timeouts import run_with_timeout
from tracedstore.coordination.connections import bare_store

INDEX = "tracedstore/KEYS"
# Maximum size of an index that is read; 100,000 barriers have about 3 MB.
_MAX_INDEX_BYTES = 16 * 1024 * 1024
_MAX_ENTRY_BYTES = 8 * 1024
# Seconds for a FileStore.
_FILE_TIMEOUT = 1.0
# More than ranks that start at once on the file of a FileStore.
_MAX_ATTEMPTS = 1000


def record_keys(store: Any, *keys: str) -> None:
    """Add keys to the index, unless the store can list its keys.

    Raises:
        TimeoutError: A FileStore does not respond.
        TracedStoreError: See `append_keys`.
    """
    bare = bare_store(store)
    if hasattr(bare, "list_keys") or type(bare).__name__ == "EtcdStore":
        return
    # Below the wrapper, where the call is not recorded: a job did not make it. One
    # append for all: a TCPStore sends no reply to it.
    state = getattr(store, "_traced", None)
    below = store if state is None else state.inner
    write = partial(append_keys, below, INDEX, *keys)
    if type(bare).__name__ == "FileStore":
        # Its calls may never return once its file is deleted, and a call that is not
        # recorded is not reported as stalled.
        run_with_timeout(_FILE_TIMEOUT, write)
    else:
        write()


def append_keys(store: Any, index: str, *keys: str) -> None:
    """Add keys to an index.

    Raises:
        TracedStoreError: A store without an append of its own changes the index all
            the time, or has lost its data.
    """
    entries = "".join(f"{json.dumps(key)}\n" for key in keys)
    if store.has_extended_api():
        store.append(index, entries)
        return
    # What torch's append does for such a store, a FileStore, without a bound.
    known = ""
    for _ in range(_MAX_ATTEMPTS):
        wanted = known + entries
        found: str = store.compare_set(index, known, wanted).decode("ascii")
        if found == wanted:
            return
        known = found
    raise TracedStoreError(
        f"{index} was not written: it changed in each of {_MAX_ATTEMPTS} attempts"
    )


def read_index(value: bytes) -> Iterator[str]:
    """Return the keys in the value of an index; malformed entries are omitted."""
    for line in value[-_MAX_INDEX_BYTES:].splitlines():
        try:
            key = validation.text(validation.load_json(line, _MAX_ENTRY_BYTES))
            key.encode()  # raises ValueError for half of a surrogate pair
            yield key
        except (ValueError, TypeError):
            continue
