"""Attach to the store of a running job, by its address, as one more client."""

import argparse
import fcntl
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from torch.distributed import FileStore, TCPStore

from tracedstore.cli.errors import CommandError
from tracedstore.core.patience import within

T = TypeVar("T")

# Seconds for all of it; with what it takes to import torch, five.
_WITHIN = 3.0
_ACCEPTED = "tcp://HOST:PORT, file:///PATH or etcd://HOST:PORT/PREFIX"


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """Let a command take a store."""
    parser.add_argument(
        "--store", required=True, metavar="URL", help=f"the job's store: {_ACCEPTED}"
    )


def look(url: str, work: Callable[[Any], T]) -> T:
    """Do something with a store, as one more client, for so long and no longer.

    Raises:
        CommandError: There is none, or something else is there, or it does not answer.
    """
    parts = urlsplit(url)
    connect = {"tcp": _tcp, "file": _file, "etcd": _etcd}.get(parts.scheme)
    if connect is None:
        raise CommandError(f"--store is {url!r}; accepted is {_ACCEPTED}")

    def looking() -> T:
        with connect(parts, url) as store:
            return work(store)

    what = f"the store at {url}"
    try:
        return within(_WITHIN, looking)
    except CommandError:
        raise
    except TimeoutError:
        raise CommandError(
            f"{what} does not answer within {_WITHIN:g} s: it hangs, or what listens"
            " there is something else"
        ) from None
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise CommandError(f"{what} cannot be read: {text}") from error


@contextmanager
def _tcp(parts: SplitResult, url: str) -> Iterator[Any]:
    host, port = _host_and_port(parts, url)
    _probe(host, port, url)
    store = TCPStore(
        host, port, None, is_master=False, timeout=timedelta(seconds=_WITHIN)
    )
    # Something that only connects is found out here: torch lists keys with the GIL
    # held, and nobody could stop waiting for that.
    store.num_keys()
    yield store


@contextmanager
def _file(parts: SplitResult, url: str) -> Iterator[Any]:
    path = Path(parts.netloc + parts.path)
    try:
        with tempfile.NamedTemporaryFile() as copy, path.open("rb") as original:
            # Of a copy, because a FileStore counts its users in the file. Nobody
            # writes to it meanwhile: writers have the same lock.
            fcntl.flock(original, fcntl.LOCK_SH)
            shutil.copyfileobj(original, copy)
            fcntl.flock(original, fcntl.LOCK_UN)
            copy.flush()
            yield FileStore(copy.name, -1)
    except OSError as error:
        raise CommandError(
            f"the store at {url} cannot be read: {path}: {error.strerror}"
        ) from None


@contextmanager
def _etcd(parts: SplitResult, url: str) -> Iterator[Any]:
    import etcd  # noqa: PLC0415 - only where there is one
    from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
        EtcdStore,
    )

    host, port = _host_and_port(parts, url)
    _probe(host, port, url)
    client = etcd.Client(host=host, port=port, read_timeout=_WITHIN)
    yield EtcdStore(client, parts.path or "/", timeout=timedelta(seconds=_WITHIN))


def _host_and_port(parts: SplitResult, url: str) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise CommandError(f"--store is {url!r}; accepted is {_ACCEPTED}")
    return host, port


def _probe(host: str, port: int, url: str) -> None:
    """Say why nobody can be reached, which torch says in many lines."""
    try:
        socket.create_connection((host, port), timeout=_WITHIN / 2).close()
    except socket.gaierror:
        raise CommandError(
            f"the store at {url} cannot be reached: the name {host!r} is not known here"
        ) from None
    except ConnectionRefusedError:
        raise CommandError(
            f"the store at {url} cannot be reached: nothing listens there; is the job"
            " still running?"
        ) from None
    except OSError as error:
        raise CommandError(
            f"the store at {url} cannot be reached: {error.strerror or error}"
        ) from None
