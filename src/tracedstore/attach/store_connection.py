"""Attach to the store of a running job as one more client."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, FileStore, TCPStore

from tracedstore.attach.address import Address
from tracedstore.core.errors import CommandError

# For as long torch tries again where something else listens, and then half as long.
_CONNECT_WITHIN = timedelta(seconds=0.5)
# Seconds for one answer; whoever attaches is ended when all of it takes too long.
_READ_WITHIN = 5


@contextmanager
def attached(address: Address) -> Iterator[Any]:
    """Give the store, which has answered by then.

    Raises:
        CommandError: There is none, or something else is there.
    """
    # torch asks for the name behind the address, and does not need it. A name server
    # that is gone would take more time than there is.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    address.reach()
    attach = {"tcp": _tcp, "file": _file, "etcd": _etcd}[address.scheme]
    try:
        with attach(address) as store:
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
            address.host, address.port, None, is_master=False, timeout=_CONNECT_WITHIN
        )
        store.num_keys()
    except DistError:
        raise address.no_tcp_store() from None
    store.set_timeout(timedelta(seconds=_READ_WITHIN))
    yield store


@contextmanager
def _file(address: Address) -> Iterator[Any]:
    try:
        with (
            tempfile.TemporaryFile() as copy,
            Path(address.path).open("rb") as original,
        ):
            # Of a copy, because a FileStore counts its users in the file. Nobody
            # writes to it meanwhile: writers have the same lock.
            fcntl.flock(original, fcntl.LOCK_SH)
            shutil.copyfileobj(original, copy)
            fcntl.flock(original, fcntl.LOCK_UN)
            copy.flush()
            # It has no name, so that nothing is left if this is ended before its end.
            yield FileStore(f"/dev/fd/{copy.fileno()}", -1)
    except OSError as error:
        raise address.unreadable(error.strerror) from None


@contextmanager
def _etcd(address: Address) -> Iterator[Any]:
    import etcd  # noqa: PLC0415 - only where there is one
    from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
        EtcdStore,
    )

    client = etcd.Client(
        host=address.host, port=address.port, read_timeout=_READ_WITHIN
    )
    try:
        yield EtcdStore(client, address.path)
    except etcd.EtcdKeyNotFound:
        raise CommandError(
            f"the etcd of {address.url} has nothing under {address.path}; torch's own"
            " rendezvous keeps its store under /torch/elastic/store"
        ) from None
    except etcd.EtcdException:
        raise address.no_etcd() from None
