"""Creates every kind of store that needs no server process."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from tracedstore.testing import FlakyStore

# The timeout of tests that wait for one. FileStore rounds it up to whole seconds.
SHORT = timedelta(milliseconds=150)

Make = Callable[[Path], Store]


def tcp(_folder: Path, *, libuv: bool = True) -> dist.TCPStore:
    """Create a TCPStore with its own server on a free port."""
    return dist.TCPStore(
        "127.0.0.1",
        0,
        None,
        is_master=True,
        wait_for_workers=False,
        use_libuv=libuv,
    )


def legacy_tcp(folder: Path) -> dist.TCPStore:
    """Create a TCPStore whose server does not use libuv."""
    return tcp(folder, libuv=False)


def file(folder: Path) -> dist.FileStore:
    """Create a FileStore on a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as fresh:
        return dist.FileStore(fresh.name, -1)


def hashed(_folder: Path) -> dist.HashStore:
    """Create a HashStore."""
    return dist.HashStore()


def python(_folder: Path) -> FlakyStore:
    """Create a store that is written in Python."""
    return FlakyStore()


# The `etcd_store` fixture creates the EtcdStore, which needs a server.
KINDS: dict[str, Make] = {
    "tcp": tcp,
    "tcp-legacy": legacy_tcp,
    "file": file,
    "hash": hashed,
    "python": python,
}


def is_listening(port: int) -> bool:
    """Return whether a process of this machine listens on a port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def second_client(store: Any) -> dist.TCPStore:
    """Connect to the server of a TCPStore once more, with a long timeout."""
    return dist.TCPStore(
        "127.0.0.1",
        store.port,
        None,
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )


@contextmanager
def client_of(store: dist.TCPStore) -> Iterator[dist.TCPStore]:
    """Open a second connection to the same server, as another rank does."""
    yield dist.TCPStore(store.host, store.port, None, is_master=False)
