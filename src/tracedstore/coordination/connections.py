"""Second connections to the server of a store.

A TCPStore is one connection under one lock. A thread of this package that reads it
while the job waits on it needs a connection of its own. It must not keep the job's
store: a store that is kept keeps its server and its port.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from tracedstore.common.identity import bottom_of, is_prefix_store
from tracedstore.common.weak_table import WeakTable
from tracedstore.recording.observer import missing_from_torch

# For one attempt to connect to the server of a TCPStore. torch may try for three times
# as long, and the end of the process waits for that.
_CONNECT_TIMEOUT = timedelta(seconds=1)
_CALL_TIMEOUT = timedelta(seconds=4)
# In the text of a TCPStore: the number and the port of its client's socket.
_SOCKET = re.compile(r"client=TCPClient\(SocketImpl\(fd=(\d+), addr=\S*:(\d+), ")
# The connections that are open.
_opened: WeakTable[None] = WeakTable()


@contextmanager
def side_connection(store: Any) -> Iterator[Any]:
    """Yield a store that can be used while another thread waits on this one.

    A TCPStore is one connection under one lock, so other calls block until a wait
    returns; a second connection has its own. The other stores have no such lock, and
    are yielded unchanged.
    """
    if not is_one_connection(store):
        yield store
        return
    connect = connector(store)
    # Not kept longer than it takes to connect.
    del store
    connection = connect()
    del connect
    try:
        yield connection
    finally:
        close_connection(connection)


def is_one_connection(store: Any) -> bool:
    """Return whether other threads cannot use a store while one waits on it."""
    # A PrefixStore if this torch does not show the store below it.
    return type(bare_store(store)).__name__ in ("TCPStore", "PrefixStore")


def connector(store: Any) -> Callable[[], Any]:
    """Return a function that connects to the server of a TCPStore again.

    That of a bare TCPStore does not keep the store. The job may free it meanwhile, and
    its server with it: a server that is kept serves its keys to the job's next process
    group at that port. A PrefixStore is cloned, because its prefix cannot be read, and
    so is a traced store, whose clone is traced.

    Raises:
        TracedStoreError: This torch cannot clone a store that is below a PrefixStore.
    """
    bare = bare_store(store)
    if store is not bare and hasattr(store, "clone"):
        clone: Callable[[], Any] = store.clone
        return clone
    while (state := getattr(store, "_traced", None)) is not None:
        store = state.inner
    if is_prefix_store(store):
        raise missing_from_torch(
            "Store.clone", "a store below a PrefixStore cannot be read while it waits"
        )
    return partial(_connect, type(bare), bare.host, bare.port)


def _connect(store_class: Any, host: str, port: int) -> Any:
    # Without a world size: a client with one counts as a rank that has joined.
    connection = store_class(
        host, port, None, is_master=False, timeout=_CONNECT_TIMEOUT
    )
    connection.set_timeout(_CALL_TIMEOUT)
    _opened.set(connection, None)
    return connection


def end_all() -> None:
    """Shut the connections down that this process opened, because it ends.

    Calls that threads are in return now, and not while Python finalizes.
    """
    for connection, _ in _opened.items():  # noqa: PERF102 - no dictionary
        # torch shows the socket of a TCPStore in its text only.
        match = _SOCKET.search(repr(connection))
        if match is None:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(match[1]))) as shared:
            # Closed since, its number may be another file's.
            if shared.getsockname()[1] == int(match[2]):
                shared.shutdown(socket.SHUT_RDWR)


def close_connection(store: Any) -> None:
    """Release a store that this process opened; a traced one lives until closed."""
    close = getattr(bottom_of(store), "close", None)
    if close is not None:
        close()


def bare_store(store: Any) -> Any:
    """Return the store below all PrefixStores and traced stores, in any order."""
    bottom = bottom_of(store)
    state = getattr(bottom, "_traced", None)
    return bottom if state is None else bare_store(state.inner)
