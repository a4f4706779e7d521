"""Attach to the store of a running job, by its address, as one more client."""

import argparse
import fcntl
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from torch.distributed import DistError, FileStore, TCPStore

from tracedstore.cli.errors import CommandError
from tracedstore.core.patience import within

T = TypeVar("T")

# Seconds to connect and get a first answer; with the import of torch, less than five.
_WITHIN = 2.5
# Seconds for all of it, of a store that did answer.
_ALL_WITHIN = 5.0
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
        return within(_ALL_WITHIN, looking)
    except CommandError as error:
        raise CommandError(str(error)) from None
    except TimeoutError:
        raise CommandError(
            f"{what} answers, but cannot be read within {_ALL_WITHIN:g} s: it is"
            " overloaded, or hangs by now"
        ) from None
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise CommandError(f"{what} cannot be read: {text}") from error


@contextmanager
def _tcp(parts: SplitResult, url: str) -> Iterator[Any]:
    host, port = _host_and_port(parts, url)
    _probe(host, port, url)

    def connect() -> Any:
        # With much less time, which torch overdraws by a second, so that it ends by
        # itself: a thread that comes back from there while Python ends aborts it.
        seconds = timedelta(seconds=_WITHIN * 0.4)
        store = TCPStore(host, port, None, is_master=False, timeout=seconds)
        # What answers nothing else is found out here: torch lists keys with the GIL
        # held, and nobody could stop waiting for that.
        store.num_keys()
        return store

    try:
        store = within(_WITHIN, connect)
    except TimeoutError:
        raise CommandError(
            f"the store at {url} does not answer within {_WITHIN:g} s: it hangs, or"
            " what listens there is something else"
        ) from None
    except DistError:
        raise CommandError(
            f"what listens at {url} hangs up: it is no TCPStore, or one of a torch too"
            " old to be asked"
        ) from None
    store.set_timeout(timedelta(seconds=_ALL_WITHIN))
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
    not_etcd = f"what listens at {url} does not answer as an etcd with the v2 API does"
    try:
        with closing(HTTPConnection(host, port, timeout=_WITHIN)) as connection:
            connection.request("GET", "/version")
            connection.getresponse().read()
    except (OSError, HTTPException):
        raise CommandError(not_etcd) from None
    client = etcd.Client(host=host, port=port, read_timeout=_ALL_WITHIN)
    try:
        yield EtcdStore(client, parts.path or "/")
    except etcd.EtcdKeyNotFound:
        raise CommandError(
            f"the etcd of {url} has nothing under {parts.path or '/'}; torch's own"
            " rendezvous keeps its store under /torch/elastic/store"
        ) from None
    except etcd.EtcdException:
        raise CommandError(not_etcd) from None


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
