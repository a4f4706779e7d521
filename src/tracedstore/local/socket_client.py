"""Asks processes of this host over their Unix sockets, many at once."""

import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from tracedstore.common import codec, validation
from tracedstore.common.codec import Unchecked, UpTo
from tracedstore.common.procfs import ancestors
from tracedstore.local import socket_directory
from tracedstore.local.facts import MAX_ANSWER_BYTES, ProcessFacts
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.local.socket_server import may_connect

# Connections at a time: the job needs its descriptors for itself.
_MAX_CONNECTIONS = 256
# Workers of one agent.
_MAX_WORKERS = 1024
_MAX_REPLY_BYTES = 2 * MAX_ANSWER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReply:
    """The reply of a process of this host.

    Attributes:
        identity: The process.
        answer: What it does; None for an agent.
        workers: What an agent knows about its workers.
        page: The page that was asked for, as JSON values that are not validated.
    """

    identity: LocalIdentity
    answer: ProcessFacts | None
    workers: Annotated[tuple[ProcessFacts, ...], UpTo(_MAX_WORKERS)]
    page: Unchecked = None

    @classmethod
    def from_bytes(cls, value: bytes) -> "LocalReply":
        """Decode a reply; ValueError if it is malformed or too large."""
        return codec.from_fields(cls, validation.load_json(value, _MAX_REPLY_BYTES))


class _Asked:
    """A process that was asked.

    Attributes:
        pid: Its process id.
        connection: The connection to it.
        deadline: Until when it may answer.
        received: What it has sent.
    """

    def __init__(self, pid: int, connection: socket.socket, deadline: float) -> None:
        self.pid = pid
        self.connection = connection
        self.deadline = deadline
        self.received = bytearray()


def ask_local(
    pid: int, kind: str, timeout: float, families: Iterable[str] = ()
) -> LocalReply | None:
    """Ask one process of this host; None if it does not listen or does not answer."""
    return ask_processes([pid], kind, timeout, families).get(pid)


def local_processes(
    timeout: float, kind: str = "status", families: Iterable[str] = ()
) -> dict[int, LocalReply | None]:
    """Ask all traced processes of this user and host, at most 4096, by pid.

    The value is None for a process that listens but does not answer in time: it is
    stopped, holds the GIL, or gets no CPU time.
    """
    return ask_processes(None, kind, timeout, families)


def ask_processes(
    pids: Iterable[int] | None,
    kind: str,
    timeout: float,
    families: Iterable[str] = (),
) -> dict[int, LocalReply | None]:
    """Ask these processes, or all; those that do not listen are omitted."""
    request = json.dumps({"kind": kind, "families": list(families)}).encode() + b"\n"
    end = time.monotonic() + timeout
    replies: dict[int, LocalReply | None] = {}
    with (
        suppress(OSError),
        socket_directory.existing() as directories,
        selectors.DefaultSelector() as selector,
    ):
        sockets = _sockets(directories, None if pids is None else set(pids))
        # So that processes that do not answer leave time for those asked after them.
        share = timeout if len(sockets) <= _MAX_CONNECTIONS else timeout / 2
        try:
            remaining = iter(sockets)
            _open_more(selector, remaining, replies, request, end, share)
            while selector.get_map() and time.monotonic() < end:
                first = min(key.data.deadline for key in selector.get_map().values())
                for key, _ in selector.select(max(0.0, first - time.monotonic())):
                    _receive(selector, key.data, replies)
                _close_expired(selector)
                _open_more(selector, remaining, replies, request, end, share)
        finally:
            for key in list(selector.get_map().values()):
                key.data.connection.close()
    return replies


def _sockets(
    directories: Iterable[int], pids: set[int] | None
) -> list[tuple[int, int]]:
    found: dict[int, int] = {}
    for directory in directories:
        for pid in socket_directory.pids(directory):
            if pids is None or pid in pids:
                found.setdefault(pid, directory)
    return list(found.items())[: socket_directory.MAX_SOCKETS]


def _open_more(
    selector: selectors.BaseSelector,
    remaining: Iterator[tuple[int, int]],
    replies: dict[int, LocalReply | None],
    request: bytes,
    end: float,
    share: float,
) -> None:
    """Ask further processes, as long as there are fewer than 256 connections."""
    while len(selector.get_map()) < _MAX_CONNECTIONS:
        pid, directory = next(remaining, (0, 0))
        if not pid:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        name = socket_directory.socket_name(pid)
        try:
            connection.connect(socket_directory.address(directory, name))
            if not may_connect(connection):
                raise PermissionError
            # A request is shorter than the buffer of a new connection.
            connection.sendall(request)
        except OSError as error:
            connection.close()
            if error.errno == errno.EAGAIN:  # it listens, but its queue is full
                replies[pid] = None
            continue
        replies[pid] = None
        asked = _Asked(pid, connection, min(end, time.monotonic() + share))
        selector.register(connection, selectors.EVENT_READ, asked)


def _receive(
    selector: selectors.BaseSelector,
    asked: _Asked,
    replies: dict[int, LocalReply | None],
) -> None:
    try:
        part = asked.connection.recv(256 * 1024)
    except BlockingIOError:
        return
    except OSError:
        part = b""
    asked.received += part
    ended = not part or part.endswith(b"\n")
    if not ended and len(asked.received) <= _MAX_REPLY_BYTES:
        return
    selector.unregister(asked.connection)
    asked.connection.close()
    try:
        reply = LocalReply.from_bytes(bytes(asked.received))
    except ValueError:
        reply = None
    if reply is not None and reply.identity.pid == asked.pid:
        replies[asked.pid] = reply
    else:
        # It ended, or it is no process of this package: nothing is known about it.
        del replies[asked.pid]


def _close_expired(selector: selectors.BaseSelector) -> None:
    now = time.monotonic()
    for key in list(selector.get_map().values()):
        if key.data.deadline <= now:
            selector.unregister(key.fileobj)
            key.data.connection.close()


def host_has_agent(timeout: float) -> bool:
    """Return whether an agent of torchrun above this process answers questions."""
    replies = ask_processes(ancestors(os.getpid()), "status", timeout)
    own = LocalIdentity.own()
    return any(
        reply is not None
        and reply.identity.rank is None
        and reply.identity.same_job(own)
        for reply in replies.values()
    )
