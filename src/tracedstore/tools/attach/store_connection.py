"""Connects to the store of a running job as one more client."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError, FileStore, TCPStore

from tracedstore.common.errors import CommandError
from tracedstore.common.text import host_port
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.etcd_access import count_keys, not_an_etcd

# torch retries for this long where another server listens, and then half as long.
_CONNECT_TIMEOUT = timedelta(seconds=0.5)
# Seconds for one answer. The process that reads is killed if all of it takes too long.
_READ_TIMEOUT = 5


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
    try:
        store = TCPStore(
            address.host, address.port, None, is_master=False, timeout=_CONNECT_TIMEOUT
        )
        store.num_keys()
    except DistError:
        raise address.not_a_tcpstore() from None
    store.set_timeout(timedelta(seconds=_READ_TIMEOUT))
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
    store.set_timeout(timedelta(seconds=_READ_TIMEOUT))
    yield store


@contextmanager
def _etcd(address: Address) -> Iterator[Any]:
    from tracedstore.etcd import EtcdV3Store  # noqa: PLC0415 - as below

    access = address.access
    context = access.context() if address.secure else None
    make = partial(
        EtcdV3Store,
        host_port(address.host, address.port),
        timeout=timedelta(seconds=_READ_TIMEOUT),
        tls=context,
        user=access.user,
        password=access.password,
    )
    if address.secure or access.user:
        transport = make("any").transport
        address.find_namespace(
            lambda prefix: count_keys(
                transport, prefix, time.monotonic() + _READ_TIMEOUT
            )
        )
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
        host=address.host, port=address.port, read_timeout=_READ_TIMEOUT, **options
    )
    try:
        yield EtcdStore(client, address.path)
    except etcd.EtcdKeyNotFound:
        raise CommandError(
            f"the etcd of {address.url} has no key under {address.path}; torch's own"
            " rendezvous keeps its store under /torch/elastic/store"
        ) from None
    except etcd.EtcdException:
        raise not_an_etcd(address.url) from None
