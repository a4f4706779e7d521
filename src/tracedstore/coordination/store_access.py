"""Access to a store beside the job: over a second connection, and in few requests.

A TCPStore is one connection under one lock. A thread of this package that reads it
while the job waits on it needs a connection of its own. It must not keep the job's
store: a store that is kept keeps its server and its port.
"""

import os
import re
import socket
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from tracedstore.common.identity import bottom_of, is_prefix_store
from tracedstore.common.keys import key_text
from tracedstore.common.weak_table import WeakTable
from tracedstore.recording.telemetry import missing_from_torch

T = TypeVar("T")

# For one attempt to connect to the server of a TCPStore. torch may try for three times
# as long, and the end of the process waits for that.
_CONNECT_TIMEOUT = timedelta(seconds=1)
_CALL_TIMEOUT = timedelta(seconds=4)
# A check sends all its keys in one request; this bounds the size of a request.
_MAX_KEYS_PER_CHECK = 4096
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


def end_connections() -> None:
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


def read_key(store: Any, key: str) -> bytes:
    """Read a key that exists, in one round trip if the store allows it.

    A TCPStore's ``get`` takes two: it waits for the key, then reads it.
    """
    # compare_set with equal expected and desired values reads the key in one round
    # trip and never changes it.
    one_round_trip = store.has_extended_api()
    value: bytes = store.compare_set(key, "", "") if one_round_trip else store.get(key)
    return value


def find_absent(
    all_present: Callable[[Sequence[T]], bool], items: Sequence[T]
) -> list[T]:
    """Find the absent items by bisection, in order.

    Args:
        all_present: Returns whether all of the given items are present.
        items: The items to search.
    """
    absent: list[T] = []
    # Depth first from the left, so that the result is in order.
    pending = [
        items[start : start + _MAX_KEYS_PER_CHECK]
        for start in range(0, len(items), _MAX_KEYS_PER_CHECK)
    ][::-1]
    while pending:
        some = pending.pop()
        if all_present(some):
            continue
        if len(some) == 1:
            absent.append(some[0])
            continue
        half = len(some) // 2
        pending += [some[half:], some[:half]]
    return absent


def absent_keys(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that do not exist, in order, in few requests."""
    in_etcd = etcd_keys(store)
    if in_etcd is not None:
        return [key for key in keys if key not in in_etcd]
    return find_absent(lambda some: bool(store.check(list(some))), keys)


def etcd_keys(store: Any) -> frozenset[str] | None:
    """List the keys of an EtcdStore in one request; None for other stores.

    Each ``check`` of an EtcdStore reads its whole directory anyway. On the other
    stores a listing costs no less than the checks it replaces, and the listing of a
    PrefixStore includes keys outside its prefix.
    """
    contents = etcd_contents(store)
    return None if contents is None else frozenset(contents.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdContents:
    """The contents of an EtcdStore.

    Attributes:
        items: Its keys and values.
        invalid_keys: Keys that no Store has written, as they are in etcd: the key is
            not the base64 of a text, or its value is not base64.
    """

    items: dict[str, bytes]
    invalid_keys: tuple[str, ...]


def etcd_contents(store: Any, *, missing_ok: bool = True) -> EtcdContents | None:
    """Read all keys and values of an EtcdStore in one request; None for others.

    Args:
        store: The store.
        missing_ok: A directory that does not exist has no keys; else etcd's exception
            is raised.
    """
    state = getattr(store, "_traced", None)
    inner = store if state is None else state.inner
    if type(inner).__name__ != "EtcdStore" or not hasattr(inner, "client"):
        return None
    try:
        nodes: Iterable[Any] = inner.client.get(key=inner.prefix).children
    except Exception as error:
        if missing_ok and type(error).__name__ == "EtcdKeyNotFound":
            return EtcdContents(items={}, invalid_keys=())  # nothing was written yet
        raise
    items: dict[str, bytes] = {}
    invalid: list[str] = []
    for node in nodes:
        if node.dir:
            continue
        encoded = node.key.removeprefix(inner.prefix)
        try:
            key = b64decode(encoded, validate=True).decode()
            items[key] = b64decode(node.value, validate=True)
        except (ValueError, TypeError):  # TypeError: no value
            invalid.append(key_text(encoded))
    return EtcdContents(items=items, invalid_keys=tuple(invalid))


def list_keys(store: Any) -> Iterable[str]:
    """List all keys of a store, in one request and without blocking."""
    in_etcd = etcd_keys(store)
    keys: Iterable[str] = store.list_keys() if in_etcd is None else in_etcd
    return keys


def read_existing(store: Any, keys: list[str]) -> list[bytes]:
    """Read the values of the keys that exist."""
    return list(read_items(store, keys).values())


def read_items(store: Any, keys: Sequence[str]) -> dict[str, bytes]:
    """Read the keys that exist, with their values."""
    absent = set(absent_keys(store, keys))
    existing = [key for key in keys if key not in absent]
    # torch implements multi_get with get for stores that have none.
    values: list[bytes] = store.multi_get(existing) if existing else []
    return dict(zip(existing, values, strict=True))
