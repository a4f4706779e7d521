"""The Unix sockets on which the processes of one user and host ask one another.

A process that has not created its store yet, or that is busy with something else, can
be asked this way: "what are you doing?" One daemon thread is blocked in ``accept``;
there is no other cost. A request is one line of JSON, and so is the answer:

    {"kind": "status", "families": ["epoch/*/go"]}
    {"identity": {...}, "answer": {...}, "workers": []}
    {"kind": "metrics"}
    {"identity": {...}, "answer": null, "workers": [], "page": [...]}

Collecting metrics may run code of the application, so it is done in a thread of its
own. While that thread is busy, further requests for them are not answered.

A process that is stopped, or that holds the GIL, does not answer in time. Its client
reads /proc then, and does not wait for one that stays stopped.

The sockets are in a private directory. It may be below /tmp, where any user can create
it first. So it is used only if it is a real directory of this user that no other user
can enter. Sockets are reached through a descriptor of the verified directory: what its
path refers to later does not matter, and the path of a socket may be longer than the
107 bytes of an address.
"""

import atexit
import errno
import hashlib
import json
import os
import re
import selectors
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from tracedstore import names
from tracedstore.common import codec, procfs, validation
from tracedstore.common.codec import LATER, Unchecked, UpTo
from tracedstore.common.keys import key_text
from tracedstore.common.procfs import ancestors
from tracedstore.common.threads import DaemonThread
from tracedstore.local.facts import (
    MAX_ANSWER_BYTES,
    MAX_FAMILIES,
    LocalIdentity,
    ProcessFacts,
    own_facts,
)
from tracedstore.recording.recorder import RECORDER

MAX_SOCKETS: Final = 4096
_PRIVATE: Final = 0o700
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})\.sock")
# Connections of a client at a time: the job needs its descriptors for itself.
_MAX_CONNECTIONS = 256
# Workers of one agent.
_MAX_WORKERS = 1024
# Silent agents that are read. The job waits for one of them, mostly.
_MAX_AGENTS = 1024
# Seconds between two looks at the processes that have not answered yet.
_BETWEEN_LOOKS: Final = 0.25
_MAX_REPLY_BYTES = 2 * MAX_ANSWER_BYTES


class NoDirectoryError(OSError):
    """There is no directory that this user can trust."""


def directory_candidates() -> list[str]:
    """Return the paths at which the directory may be, the preferred one first."""
    name = f"tracedstore-{os.getuid()}"
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - verified before use
    paths = [os.path.join(base, name) for base in bases if os.path.isabs(base)]  # noqa: PTH117, PTH118 - no Path is needed
    return list(dict.fromkeys(paths))


@contextmanager
def create_directory() -> Iterator[int]:
    """Create the directory unless it exists, and yield a descriptor of it.

    Raises:
        NoDirectoryError: None of the paths can be created or trusted.
    """
    for path in directory_candidates():
        with suppress(OSError):
            os.mkdir(path, _PRIVATE)  # noqa: PTH102 - no Path is needed
        with suppress(OSError):
            descriptor = _open_verified(path)
            break
    else:
        raise NoDirectoryError(
            f"none of {', '.join(directory_candidates())} is a private directory of"
            " this user; remove what is there, or set XDG_RUNTIME_DIR"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def existing_directories() -> Iterator[list[int]]:
    """Yield descriptors of all directories that exist and can be trusted.

    Processes of one job may have different temporary directories.
    """
    descriptors: list[int] = []
    try:
        for path in directory_candidates():
            with suppress(OSError):
                descriptors.append(_open_verified(path))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _open_verified(path: str) -> int:
    """Open a directory; OSError unless it is this user's and private."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == _PRIVATE:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a private directory of this user")


def socket_address(directory: int, name: str) -> str:
    """Return the address of a socket in an open directory."""
    return f"/proc/self/fd/{directory}/{name}"


def socket_name(pid: int) -> str:
    """Return the name of the socket of a process of this pid namespace.

    Containers may share the directory, and hosts too, where it is on a network file
    system. The name has a digest of the namespace, so that pids are not mixed up.
    """
    return f"{namespace_digest()}-{pid}.sock"


def pids_with_sockets(directory: int) -> list[int]:
    """Return the pids of this namespace that have a socket, at most 4096."""
    digest = namespace_digest()
    found: list[int] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and match[1] == digest:
                found.append(int(match[2]))
                if len(found) == MAX_SOCKETS:
                    break
    return found


def remove_stale_sockets(directory: int) -> None:
    """Remove the sockets of processes that have ended."""
    for pid in pids_with_sockets(directory):
        if procfs.is_absent(pid):
            remove_socket(directory, pid)


def remove_socket(directory: int, pid: int) -> None:
    """Remove the socket of a process, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(socket_name(pid), dir_fd=directory)


def namespace_digest() -> str:
    """Return a text that identifies the pid namespace of this process.

    Raises:
        NoDirectoryError: It cannot be known.
    """
    namespace = procfs.own_namespace()
    if namespace is None:
        raise NoDirectoryError("/proc does not show the processes of this namespace")
    return hashlib.sha256(namespace.encode()).hexdigest()[:16]


KINDS: Final = ("status", "stacks")
# The pages that torchrun's agent asks its workers for, to serve them: as they are, and
# with the histograms that it sums.
METRICS_PAGE: Final = "metrics"
NODE_METRICS_PAGE: Final = "node_metrics"
MAX_REQUEST_BYTES: Final = 64 * 1024
# Seconds for one client to send its request and to receive the answer.
_CLIENT_TIMEOUT = 1.0
# Clients that the kernel queues. Several ranks may ask at once.
_BACKLOG = 128
# Seconds that the end of a process waits for the thread, if nothing else stopped it.
_EXIT_TIMEOUT = 1.0
_PEER_CREDENTIALS: Final = struct.Struct("3i")

Workers = Callable[[], list[ProcessFacts]]
# Returns JSON values.
Page = Callable[[], Any]


class LocalSocket:
    """The socket of this process, and the thread that serves it.

    Attributes:
        enabled: The setting ``answers``: nothing is started while it is off.
        identity: Returns the identity of this process.
        workers: Returns what an agent of torchrun knows about its workers.
        silent_agents: Returns the other agents that send it no heartbeats.
        metrics: Returns the metrics that this process lets its agent serve.
        node_metrics: The same, with the histograms that the agent sums.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._hooks_set = False
        self._listening: socket.socket | None = None
        self.reset()

    def reset(self) -> None:
        """Close an inherited socket, as a forked child must; the file is the parent's.

        The child listens again when it registers.
        """
        if self._listening is not None:
            self._listening.close()
        self._listening = None
        self._thread: DaemonThread | None = None
        self._lock = threading.Lock()
        self._rendering = threading.Lock()
        self.metrics: Page | None = None
        self.node_metrics: Page | None = None
        self.identity: Callable[[], LocalIdentity] = LocalIdentity.own
        self.workers: Workers = list
        self.silent_agents: Workers = list

    def enable(self, *, on: bool) -> None:
        """Apply the setting ``answers``."""
        self.enabled = on
        if not on:
            self.stop(_EXIT_TIMEOUT)

    def start(self) -> None:
        """Begin to listen, unless it listens already or is disabled.

        Raises:
            OSError: The socket cannot be created.
            RuntimeError: No thread can be started.
        """
        with self._lock:
            if self._listening is not None or not self.enabled:
                return
            listening = _listen()
            thread = DaemonThread(self._serve, listening, name="tracedstore-answers")
            try:
                thread.start()
            except RuntimeError:
                listening.close()
                raise
            self._listening, self._thread = listening, thread
            if not self._hooks_set:
                os.register_at_fork(after_in_child=self.reset)
                atexit.register(self.stop, _EXIT_TIMEOUT)
                self._hooks_set = True

    def stop(self, timeout: float) -> None:
        """Remove the socket, and wait for the thread within the timeout."""
        with self._lock:
            listening, self._listening = self._listening, None
            thread, self._thread = self._thread, None
        if listening is None or thread is None:
            return
        with suppress(OSError), existing_directories() as directories:
            for directory in directories:
                remove_socket(directory, os.getpid())
        with suppress(OSError):
            # Linux wakes the thread in accept.
            listening.shutdown(socket.SHUT_RDWR)
        thread.join(timeout)
        listening.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                if self._ended(listening):
                    return
                time.sleep(0.1)  # too many open files
                continue
            handed_over = False
            with suppress(OSError, ValueError):
                handed_over = self._answer(client)
            if not handed_over:
                client.close()

    def _ended(self, listening: socket.socket) -> bool:
        with self._lock:
            return listening is not self._listening

    @property
    def listening(self) -> bool:
        """Whether this process can be asked."""
        return self._listening is not None

    def _answer(self, client: socket.socket) -> bool:
        """Answer; return whether another thread answers and closes the connection."""
        if not may_connect(client):
            return False
        deadline = time.monotonic() + _CLIENT_TIMEOUT
        kind, families = _request(receive_line(client, MAX_REQUEST_BYTES, deadline))
        if kind in KINDS:
            _send(client, self._state(kind, families), deadline)
            return False
        # An agent that has waited in vain may have asked again since.
        if _is_gone(client) or not self._rendering.acquire(blocking=False):
            return False
        collect = self.metrics if kind == METRICS_PAGE else self.node_metrics
        thread = DaemonThread(self._send_page, client, collect, name="tracedstore-page")
        try:
            thread.start()
        except RuntimeError:
            self._rendering.release()
            return False
        return True

    def _send_page(self, client: socket.socket, collect: Page | None) -> None:
        try:
            page = None if collect is None else collect()
            reply: dict[str, Any] = {
                "identity": codec.to_fields(self.identity()),
                "answer": None,
                "workers": [],
                "page": page,
            }
            _send(client, reply, time.monotonic() + _CLIENT_TIMEOUT)
        except OSError:
            pass  # the agent does not wait any more
        except Exception as error:
            RECORDER.failures.add(names.ENDPOINT, error)
        finally:
            client.close()
            self._rendering.release()

    def _state(self, kind: str, families: list[str]) -> dict[str, Any]:
        identity = self.identity()
        answer = None
        if identity.rank is not None:
            answer = own_facts(
                identity.rank, families, with_stacks=kind == "stacks"
            ).to_fields()
        return {
            "identity": codec.to_fields(identity),
            "answer": answer,
            "workers": [worker.to_fields() for worker in self.workers()],
            "silent_agents": [agent.to_fields() for agent in self.silent_agents()],
        }


def _is_gone(client: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    client.setblocking(False)
    try:
        return not client.recv(1)
    except BlockingIOError:
        return False


def _send(client: socket.socket, reply: dict[str, Any], deadline: float) -> None:
    encoded = json.dumps(reply).encode() + b"\n"
    client.settimeout(max(0.01, deadline - time.monotonic()))
    client.sendall(encoded)


def _listen() -> socket.socket:
    """Create the socket of this process, and remove those of ended processes."""
    with create_directory() as directory:
        remove_stale_sockets(directory)
        # A process that had this pid may have left its socket.
        remove_socket(directory, os.getpid())
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name = socket_name(os.getpid())
            listening.bind(socket_address(directory, name))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening


def may_connect(peer: socket.socket) -> bool:
    """Return whether the other end belongs to this user or to root."""
    size = _PEER_CREDENTIALS.size
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    return uid in (0, os.getuid())


def receive_line(peer: socket.socket, max_bytes: int, deadline: float) -> bytes:
    """Receive one line; ValueError if it is longer, TimeoutError at the deadline."""
    received = bytearray()
    while not received.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        peer.settimeout(remaining)
        part = peer.recv(64 * 1024)
        if not part:
            raise ValueError("the line has no end")
        received += part
        if len(received) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
    return bytes(received)


def _request(line: bytes) -> tuple[str, list[str]]:
    fields = validation.load_json(line, MAX_REQUEST_BYTES)
    known = (*KINDS, METRICS_PAGE, NODE_METRICS_PAGE)
    if type(fields) is not dict or fields.get("kind") not in known:
        raise ValueError("not a question")
    families = fields.get("families", [])
    if type(families) is not list:
        raise ValueError("not a list of key families")
    return fields["kind"], [key_text(family) for family in families[:MAX_FAMILIES]]


# One a process: its socket has the name of its pid.
LOCAL_SOCKET: Final = LocalSocket()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReply:
    """The reply of a process of this host.

    Attributes:
        identity: The process.
        answer: What it does; None for an agent.
        workers: What an agent knows about its workers.
        silent_agents: The other agents that send it no heartbeats: their group ranks,
            and how long they have been silent.
        page: The page that was asked for, as JSON values that are not validated.
    """

    identity: LocalIdentity
    answer: ProcessFacts | None
    workers: Annotated[tuple[ProcessFacts, ...], UpTo(_MAX_WORKERS)]
    silent_agents: Annotated[tuple[ProcessFacts, ...], UpTo(_MAX_AGENTS), LATER] = ()
    page: Unchecked = None

    @classmethod
    def from_bytes(cls, value: bytes) -> "LocalReply":
        """Decode a reply; ValueError if it is malformed or too large."""
        return codec.from_fields(cls, validation.load_json(value, _MAX_REPLY_BYTES))


@dataclass(slots=True)
class _Asked:
    """A process that was asked.

    Attributes:
        pid: Its process id.
        connection: The connection to it.
        deadline: Until when it may answer.
        received: What it has sent.
    """

    pid: int
    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


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
        existing_directories() as directories,
        selectors.DefaultSelector() as selector,
    ):
        sockets = _sockets(directories, None if pids is None else set(pids))
        # So that processes that do not answer leave time for those asked after them.
        share = timeout if len(sockets) <= _MAX_CONNECTIONS else timeout / 2
        try:
            remaining = iter(sockets)
            _open_more(selector, remaining, replies, request, end, share)
            look_at, halted = time.monotonic(), set[int]()
            while selector.get_map() and time.monotonic() < end:
                first = min(key.data.deadline for key in selector.get_map().values())
                until = min(first, look_at)
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    _receive(selector, key.data, replies)
                _close_expired(selector)
                if time.monotonic() >= look_at:
                    halted = _close_halted(selector, halted)
                    look_at = time.monotonic() + _BETWEEN_LOOKS
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
        for pid in pids_with_sockets(directory):
            if pids is None or pid in pids:
                found.setdefault(pid, directory)
    return list(found.items())[:MAX_SOCKETS]


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
        name = socket_name(pid)
        try:
            connection.connect(socket_address(directory, name))
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


def _close_halted(selector: selectors.BaseSelector, halted: set[int]) -> set[int]:
    """Close the connections to processes that stay stopped; return those stopped now.

    Args:
        selector: The connections.
        halted: The processes that were stopped at the last look.
    """
    now = set()
    for key in list(selector.get_map().values()):
        found = procfs.read_stat(key.data.pid)
        if found is not None and procfs.is_halted(found.letter):
            now.add(key.data.pid)
            if key.data.pid in halted:
                selector.unregister(key.fileobj)
                key.data.connection.close()
    return now


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
