"""Connects to the store of a running job, and copies its contents at one time.

The store is read as by one more client, without writing and without waiting.
"""

import fcntl
import os
import shutil
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from torch.distributed import (
    DistError,
    DistNetworkError,
    DistStoreError,
    FileStore,
    TCPStore,
)

from tracedstore.common import validation
from tracedstore.common.errors import CommandError
from tracedstore.common.text import host_port
from tracedstore.coordination.arrivals import is_ledger_key
from tracedstore.coordination.store_access import etcd_contents, list_keys
from tracedstore.etcd import EtcdV3Store
from tracedstore.etcd.gateway import count, key_values, range_of
from tracedstore.etcd.namespace import rendezvous_key
from tracedstore.tools.attach.address import Address

# torch retries for this long where another server listens, and then half as long.
_CONNECT_TIMEOUT = timedelta(seconds=0.5)
# The same for a server that has answered as a TCPStore does: it is busy at worst.
_BUSY_TIMEOUT = timedelta(seconds=3)
# Seconds for one answer. The process that reads is killed if all of it takes too long.
_ANSWER_TIMEOUT = 5
# Keys per multi_get request.
_BATCH_SIZE = 1024
# The same for ledgers, which are large.
_LEDGER_BATCH_SIZE = 8
# Maximum size of all ledgers; the last batch that is read may exceed it. The ledger of
# 98,304 ranks has 1.2 MB, so this is enough for 28 barriers of such a job.
MAX_LEDGER_BYTES = 32 * 1024 * 1024
# Seconds for one request, which waits for a key that was deleted after it was listed.
_READ_TIMEOUT = 1.0
_MAX_COUNTER = 10**12
_ETCD_RENDEZVOUS = "/torch/elastic/rendezvous"


class StoreSnapshot:
    """A copy of a store's keys, with the reading half of the Store interface.

    Reading an absent key raises KeyError instead of waiting for it.

    Attributes:
        keys: All keys of the store.
        invalid_keys: Keys of an etcd that no Store has written.
        unread_ledgers: Keys of ledgers that were not read, because those that were
            read have `MAX_LEDGER_BYTES` together.
        etcd_rendezvous: The rendezvous states that torch's etcd-v2 backend and
            traced-etcd keep outside the store, as base64 by run id.
    """

    def __init__(
        self,
        keys: Iterable[str],
        values: dict[str, bytes],
        etcd_rendezvous: Mapping[str, bytes] | None = None,
        *,
        invalid_keys: tuple[str, ...] = (),
        unread_ledgers: Iterable[str] = (),
    ) -> None:
        self.keys = frozenset(keys)
        self.invalid_keys = invalid_keys
        self.unread_ledgers = frozenset(unread_ledgers)
        self._values = values
        self.etcd_rendezvous = etcd_rendezvous or {}

    @classmethod
    def take(
        cls,
        store: Any,
        select: Callable[[Sequence[str]], list[str]],
        heartbeat: Callable[[], None] = lambda: None,
    ) -> "StoreSnapshot":
        """Read all keys of a store, and the values of some.

        Args:
            store: The store.
            select: Returns the keys whose values are read. Ledgers are read last, in
                this order, up to `MAX_LEDGER_BYTES`.
            heartbeat: Is called after each answer of the store.

        Raises:
            CommandError: The store cannot list its keys.
        """
        contents = etcd_contents(store, missing_ok=False)
        if contents is not None:
            heartbeat()
            return cls(
                contents.items,
                contents.items,
                _etcd_rendezvous(store),
                invalid_keys=contents.invalid_keys,
            )
        keys = _list_keys(store)
        heartbeat()
        store.set_timeout(timedelta(seconds=_READ_TIMEOUT))
        values: dict[str, bytes] = {}
        selected = select(keys)
        remaining = iter([key for key in selected if not is_ledger_key(key)])
        while batch := list(islice(remaining, _BATCH_SIZE)):
            values |= _read_values(store, batch, heartbeat)
            heartbeat()
        ledgers = iter([key for key in selected if is_ledger_key(key)])
        size = 0
        while size < MAX_LEDGER_BYTES and (
            batch := list(islice(ledgers, _LEDGER_BATCH_SIZE))
        ):
            read = _read_values(store, batch, heartbeat)
            size += sum(map(len, read.values()))
            values |= read
            heartbeat()
        unread = set(ledgers)
        deleted = set(selected) - values.keys() - unread
        return cls(
            set(keys) - deleted,
            values,
            _v3_rendezvous(store),
            unread_ledgers=unread,
        )

    def list_keys(self) -> list[str]:
        """Return the keys whose values were read."""
        return list(self._values)

    def get(self, key: str) -> bytes:
        """Return a value that was read."""
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist."""
        return self.keys.issuperset(keys)

    def add(self, key: str, _zero: int) -> int:
        """Return a counter; callers read one by adding 0 to it.

        Raises:
            ValueError: The value is not a number below 10**12.
        """
        return validation.digits(self._values[key], _MAX_COUNTER)

    @staticmethod
    def has_extended_api() -> bool:
        """Return False: a snapshot has no append and no compare_set."""
        return False


def _list_keys(store: Any) -> list[str]:
    try:
        return sorted(list_keys(store))
    except NotImplementedError:
        raise CommandError(
            f"the store, a {type(store).__name__}, does not list its keys, so nothing"
            " can be found in it; its class has to implement list_keys()"
        ) from None
    except DistNetworkError:
        # A server of torch 2.8 or 2.9 does not know the request, and hangs up.
        raise CommandError(
            "the store closed the connection when its keys were requested: the job has"
            " just ended, its torch is older than 2.10, or another server listens there"
        ) from None


def _read_values(
    store: Any, keys: list[str], heartbeat: Callable[[], None]
) -> dict[str, bytes]:
    try:
        return dict(zip(keys, store.multi_get(keys), strict=True))
    except (DistStoreError, RuntimeError):
        # A key was deleted meanwhile. Others may be deleted while these are read.
        values = {}
        for key in keys:
            with suppress(DistStoreError, RuntimeError):
                if store.check([key]):
                    values[key] = store.get(key)
            heartbeat()
        return values


def _etcd_rendezvous(store: Any) -> dict[str, bytes]:
    if not str(getattr(store, "prefix", "")).startswith("/torch/elastic/"):
        return {}
    try:
        nodes = store.client.get(_ETCD_RENDEZVOUS).children
    except Exception:  # no rendezvous, or etcd failed after the store was read
        return {}
    return {
        str(node.key).removeprefix(f"{_ETCD_RENDEZVOUS}/"): str(node.value).encode()
        for node in nodes
        if not node.dir
    }


def _v3_rendezvous(store: Any) -> dict[str, bytes]:
    if type(store).__name__ != "EtcdV3Store":
        return {}
    key = rendezvous_key(store.namespace).encode()
    deadline = time.monotonic() + _READ_TIMEOUT
    try:
        answer = store.transport.call(
            "kv/range", range_of(key), deadline, repeatable=True
        )
    except DistStoreError:  # etcd failed after the store was read
        return {}
    found = key_values(answer)
    return {unquote(store.namespace): b64encode(found[0].value)} if found else {}


@contextmanager
def connect(address: Address, *, for_writing: bool = False) -> Iterator[Any]:
    """Yield a client of the store, which has answered by then.

    Args:
        address: The store.
        for_writing: What is written must reach the job.

    Raises:
        CommandError: There is no store, or another server answers.
    """
    # torch looks up the host name of the address and does not need it. With a dead
    # name server that would exceed the time that a command has.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    address.check_reachable()
    file = _original_file if for_writing else _file
    connect_to = {"tcp": _tcp, "file": file, "etcd": _etcd}[address.scheme]
    try:
        with connect_to(address) as store:
            yield store
    except CommandError:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise CommandError(
            f"the store at {address.url} cannot be read: {text}"
        ) from error


@contextmanager
def _tcp(address: Address) -> Iterator[Any]:
    timeout = _BUSY_TIMEOUT if address.has_answered else _CONNECT_TIMEOUT
    try:
        store = TCPStore(
            address.host, address.port, None, is_master=False, timeout=timeout
        )
        store.num_keys()
    except DistError:
        if address.has_answered:
            raise address.overloaded(timeout.total_seconds()) from None
        raise address.not_a_tcpstore() from None
    store.set_timeout(timedelta(seconds=_ANSWER_TIMEOUT))
    yield store


@contextmanager
def _file(address: Address) -> Iterator[Any]:
    try:
        with (
            tempfile.TemporaryFile() as copy,
            Path(address.path).open("rb") as original,
        ):
            # A copy, because a FileStore counts its users in the file. Writers take
            # the same lock, so the copy is consistent.
            fcntl.flock(original, fcntl.LOCK_SH)
            shutil.copyfileobj(original, copy)
            fcntl.flock(original, fcntl.LOCK_UN)
            copy.flush()
            # Opened by descriptor: an unnamed file disappears however this ends.
            yield FileStore(f"/dev/fd/{copy.fileno()}", -1)
    except OSError as error:
        raise address.unreadable(error.strerror) from None


@contextmanager
def _original_file(address: Address) -> Iterator[Any]:
    # It counts as one more user of the file while it is open. Without a number of
    # workers it never deletes the file.
    store = FileStore(address.path, -1)
    store.set_timeout(timedelta(seconds=_ANSWER_TIMEOUT))
    yield store


@contextmanager
def _etcd(address: Address) -> Iterator[Any]:
    access = address.access
    context = access.context() if address.secure else None
    make = partial(
        EtcdV3Store,
        host_port(address.host, address.port),
        timeout=timedelta(seconds=_ANSWER_TIMEOUT),
        tls=context,
        user=access.user,
        password=access.password,
    )
    if address.secure or access.user:
        transport = make("any").transport
        address.find_namespace(partial(_count_keys, transport))
    if address.namespace:
        yield make(address.namespace)
        return
    import etcd  # noqa: PLC0415 - only for an etcd:// address
    from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
        EtcdStore,
    )

    options: dict[str, Any] = {}
    if address.secure:
        options["protocol"], options["ca_cert"] = "https", access.ca_cert
        if access.ssl_cert:
            options["cert"] = (access.ssl_cert, access.ssl_cert_key or access.ssl_cert)
    client = etcd.Client(
        host=address.host, port=address.port, read_timeout=_ANSWER_TIMEOUT, **options
    )
    try:
        yield EtcdStore(client, address.path)
    except etcd.EtcdKeyNotFound:
        raise CommandError(
            f"the etcd of {address.url} has no key under {address.path}; torch's own"
            " rendezvous keeps its store under /torch/elastic/store"
        ) from None
    except etcd.EtcdException:
        raise address.not_an_etcd() from None


def _count_keys(transport: Any, prefix: str) -> int:
    """Return the number of keys below a prefix, over the v3 API.

    Raises:
        EtcdError: The server, its certificate or the user is not accepted.
    """
    # The character after a slash ends the range.
    keys = prefix.encode(), (prefix[:-1] + "0").encode()
    request = range_of(keys, count_only=True)
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    return count(transport.call("kv/range", request, deadline, repeatable=True))
