"""Every kind of store, made the same way for all tests."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from tracedstore.testing import FlakyStore

# Tests that wait for a timeout wait this long; a FileStore rounds it up to seconds.
SHORT = timedelta(milliseconds=150)

Make = Callable[[Path], Store]


def tcp(_folder: Path, *, libuv: bool = True) -> dist.TCPStore:
    """A server of its own on a free port, and its client."""
    return dist.TCPStore(
        "127.0.0.1",
        0,
        None,
        is_master=True,
        wait_for_workers=False,
        use_libuv=libuv,
    )


def legacy_tcp(folder: Path) -> dist.TCPStore:
    """The server without libuv."""
    return tcp(folder, libuv=False)


def file(folder: Path) -> dist.FileStore:
    """A file that no other store uses."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as fresh:
        return dist.FileStore(fresh.name, -1)


def hashed(_folder: Path) -> dist.HashStore:
    """In memory."""
    return dist.HashStore()


def python(_folder: Path) -> FlakyStore:
    """A user's own store, in Python."""
    return FlakyStore()


# Those that need no server. EtcdStore is made by the `etcd_store` fixture.
KINDS: dict[str, Make] = {
    "tcp": tcp,
    "tcp-legacy": legacy_tcp,
    "file": file,
    "hash": hashed,
    "python": python,
}


@contextmanager
def client_of(store: dist.TCPStore) -> Iterator[dist.TCPStore]:
    """A second connection to the same server, as another rank has one."""
    yield dist.TCPStore(store.host, store.port, None, is_master=False)
