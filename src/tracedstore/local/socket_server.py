"""Answers "what are you doing?" on a Unix socket, to processes of the same user.

A process that has not created its store yet, or that is busy with something else, can
be asked this way. One daemon thread is blocked in ``accept``; there is no other cost. A
request is one line of JSON, and so is the answer:

    {"kind": "status", "families": ["epoch/*/go"]}
    {"identity": {...}, "answer": {...}, "workers": []}
    {"kind": "metrics"}
    {"identity": {...}, "answer": null, "workers": [], "page": [...]}

Collecting metrics may run code of the application, so it is done in a thread of its
own. While that thread is busy, further requests for them are not answered.

A process that is stopped, or that holds the GIL, does not answer in time. Its client
reads /proc then.
"""

import atexit
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from tracedstore import names
from tracedstore.common import codec, validation
from tracedstore.common.keys import key_text
from tracedstore.common.threads import DaemonThread
from tracedstore.local import socket_directory
from tracedstore.local.facts import MAX_FAMILIES, ProcessFacts
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.local.own_facts import own_facts
from tracedstore.recording.recorder import RECORDER

KINDS: Final = ("status", "stacks")
# The page that torchrun's agent asks its workers for, to serve it for them.
METRICS_PAGE: Final = "metrics"
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
        metrics: Returns the metrics that this process lets its agent serve.
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
        self.identity: Callable[[], LocalIdentity] = LocalIdentity.own
        self.workers: Workers = list

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
        with suppress(OSError), socket_directory.existing() as directories:
            for directory in directories:
                socket_directory.remove(directory, os.getpid())
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
        if kind != METRICS_PAGE:
            _send(client, self._state(kind, families), deadline)
            return False
        # An agent that has waited in vain may have asked again since.
        if _is_gone(client) or not self._rendering.acquire(blocking=False):
            return False
        thread = DaemonThread(self._send_page, client, name="tracedstore-page")
        try:
            thread.start()
        except RuntimeError:
            self._rendering.release()
            return False
        return True

    def _send_page(self, client: socket.socket) -> None:
        try:
            page = None if self.metrics is None else self.metrics()
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
    with socket_directory.create() as directory:
        socket_directory.remove_stale(directory)
        # A process that had this pid may have left its socket.
        socket_directory.remove(directory, os.getpid())
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name = socket_directory.socket_name(os.getpid())
            listening.bind(socket_directory.address(directory, name))
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
    if type(fields) is not dict or fields.get("kind") not in (*KINDS, METRICS_PAGE):
        raise ValueError("not a question")
    families = fields.get("families", [])
    if type(families) is not list:
        raise ValueError("not a list of key families")
    return fields["kind"], [key_text(family) for family in families[:MAX_FAMILIES]]


# One a process: its socket has the name of its pid.
LOCAL_SOCKET: Final = LocalSocket()
