"""HTTP/1.1 to the members of an etcd cluster: addresses, TLS, connections, and a pool.

The answers are read here and not by a library, because a deadline for the whole answer,
its size, and what a signal handler raises are the point. docs/design.md has what
``http.client`` and urllib3 cost instead.
"""

import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from tracedstore.common.errors import ConfigurationError
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.text import host_port
from tracedstore.etcd.etcd_errors import (
    EtcdError,
    Failure,
    RequestFailed,
    connection_failure,
)

_DEFAULT_PORT = 2379
_ACCEPTED = "accepted is HOST:PORT, http://HOST:PORT or https://HOST:PORT"
_READ_BYTES = 65_536
_MAX_HEAD_BYTES = 65_536
# Bounds what a broken server can make a job allocate.
_MAX_BODY_BYTES = 256 * 1024 * 1024
# Seconds until a host that vanished without a word is noticed: idle, interval, count.
_KEEPALIVE = (10, 5, 3)
_MAX_IDLE = 8
_TLS_HINTS = {
    False: "; if it speaks TLS, use https:// or the TLS settings",
    True: "; if it does not speak TLS, use http://",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The files for TLS.

    Attributes:
        ca_cert: The certificate of the authority that signed the server's; by default
            those of the system.
        cert: The client's certificate, where etcd requires one.
        key: The key of the client's certificate, unless ``cert`` has it too.
    """

    ca_cert: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ConfigurationError: A file cannot be read, or is no certificate or key.
        """
        if self.key is not None and self.cert is None:
            raise self._unusable("there is a key, and no certificate for it")
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca_cert is None else os.fspath(self.ca_cert)
            )
            if self.cert is not None:
                key = None if self.key is None else os.fspath(self.key)
                # Without this, OpenSSL asks for a password on the terminal.
                context.load_cert_chain(os.fspath(self.cert), key, self._refuse)
        except ssl.SSLError as error:
            text = "not a certificate, or not its key"
            raise self._unusable(text) from error
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        return context

    def _refuse(self) -> str:
        raise self._unusable("the key has a password, which is not supported")

    def _unusable(self, text: str) -> ConfigurationError:
        return ConfigurationError(
            f"the files for TLS with etcd cannot be used: {text}"
            f" (ca_cert={self.ca_cert}, cert={self.cert}, key={self.key})"
        )


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """One member of a cluster.

    Attributes:
        host: Its name or address.
        port: Its port for clients.
        secure: Whether it is reached over TLS.
    """

    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_endpoints(
    endpoints: str | Sequence[str], *, secure: bool
) -> list[ClusterMember]:
    """Parse a list of endpoints, or a text with commas between them.

    Args:
        endpoints: The endpoints.
        secure: Whether an endpoint without a scheme is reached over TLS.

    Raises:
        ConfigurationError: There is none, or one is invalid.
    """
    texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    found = [_parse(text.strip(), secure=secure) for text in texts if text.strip()]
    if not found:
        raise ConfigurationError(f"etcd has no endpoints; {_ACCEPTED}")
    return found


def _parse(text: str, *, secure: bool) -> ClusterMember:
    scheme = "https" if secure else "http"
    if "@" in text:
        # It may have a password, so it is not in the text.
        raise ConfigurationError(
            "an etcd endpoint has no user: user and password are separate settings"
        )
    try:
        parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
        # As it is in DNS, and in a header.
        host = (parts.hostname or "").encode("idna").decode("ascii")
        port = parts.port or _DEFAULT_PORT
    except ValueError:  # UnicodeError is one
        raise _invalid(text) from None
    rest = (parts.path.strip("/"), parts.query, parts.fragment)
    if parts.scheme not in ("http", "https") or not host or any(rest):
        raise _invalid(text)
    return ClusterMember(host, port, parts.scheme == "https")


def _invalid(text: str) -> ConfigurationError:
    return ConfigurationError(f"the etcd endpoint {text!r} is invalid; {_ACCEPTED}")


class NotHttpError(OSError):
    """The server does not speak HTTP."""


class Connection:
    """One connection to a server.

    Attributes:
        reusable: The last answer was read completely, and another request may follow.
        received: Bytes read so far.
        sent: The last request was sent completely.
    """

    _socket: socket.socket

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self.reusable = False
        self.received = 0
        self.sent = False
        self._host, self._port, self._context = host, port, context
        self._aborted = False
        self._buffer = bytearray()

    def connect(self, deadline: float) -> None:
        """Connect to the first address of the host that accepts a connection."""
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for left, (family, kind, protocol, _, address) in zip(
            range(len(found), 0, -1), found, strict=True
        ):
            try:
                self._use(socket.socket(family, kind, protocol))
                # An address that does not answer leaves time for the others.
                self._socket.settimeout(_left(deadline) / left)
                self._socket.connect(address)
                self._start(deadline)
            except ssl.SSLError:  # a server was reached
                self.close()
                raise
            except OSError as error:
                self.close()
                if left == 1 or self._aborted or raised_by_handler(error):
                    raise
            else:
                return

    def _start(self, deadline: float) -> None:
        sock = self._socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(
            ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEPALIVE, strict=True
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._context is not None:
            sock.settimeout(_left(deadline))
            secured = self._context.wrap_socket(
                sock, server_hostname=self._host, do_handshake_on_connect=False
            )
            self._use(secured)
            secured.do_handshake()

    def _use(self, sock: socket.socket) -> None:
        self._socket = sock
        if self._aborted:
            raise ConnectionAbortedError("the connection was closed")

    def is_stale(self) -> bool:
        """Return whether the server has closed the idle connection."""
        try:
            self._socket.settimeout(0.0)
            # An idle server sends nothing: bytes, too, make the connection unusable.
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError as error:
            if raised_by_handler(error):
                raise
            return True
        return True

    def write(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        deadline: float,
    ) -> None:
        """Send a request; if this raises, the server has not got all of it."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host_port(self._host, self._port)}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
            "\r\n",
        ]
        request = "\r\n".join(lines).encode("latin-1") + body
        self.reusable = self.sent = False
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(request)
        self.sent = True

    def read_answer(self, deadline: float) -> tuple[int, bytes]:
        """Read an answer: its status and its body."""
        status, length, chunked, keep = self._read_head(deadline)
        if chunked:
            body = self._join_chunks(deadline)
        elif length is None:
            body, keep = self._read_to_end(deadline), False
        else:
            body = self._take(length, deadline)
        self.reusable = keep
        return status, body

    def read_stream(self, deadline: float) -> tuple[int, Iterator[bytes]]:
        """Read the start of an endless answer: its status, and its lines."""
        status, length, chunked, _ = self._read_head(deadline)
        if not chunked:
            body = self._take(length or 0, deadline)
            return status, iter(body.splitlines())
        return status, self._lines(deadline)

    def abort(self) -> None:
        """End a call that is blocked in this connection in another thread."""
        self._aborted = True
        with suppress(OSError, AttributeError):
            # Not SSLSocket's own, which is not made for a second thread.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError, AttributeError):
            self._socket.close()

    def __del__(self) -> None:
        # A store is dropped without being closed, as torch's stores are.
        self.close()

    def _lines(self, deadline: float) -> Iterator[bytes]:
        rest = bytearray()
        for chunk in self._chunks(deadline):
            searched = len(rest)
            rest += chunk
            while (end := rest.find(b"\n", searched)) >= 0:
                line, searched = bytes(rest[:end]), 0
                del rest[: end + 1]
                yield line
            if len(rest) > _MAX_BODY_BYTES:
                raise NotHttpError("the server sends an endless line")
        if rest:
            yield bytes(rest)

    def _join_chunks(self, deadline: float) -> bytes:
        body = bytearray()
        for chunk in self._chunks(deadline):
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise NotHttpError("the answer is too long")
        return bytes(body)

    def _chunks(self, deadline: float) -> Iterator[bytes]:
        while size := self._number(self._line(deadline).partition(b";")[0], 16):
            chunk = self._take(size, deadline)
            self._line(deadline)
            yield chunk
        for _ in self._header_lines(deadline):  # trailers
            pass

    def _read_head(self, deadline: float) -> tuple[int, int | None, bool, bool]:
        first = self._line(deadline)
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise NotHttpError("the server does not speak HTTP")
        status = self._number(rest[:3])
        length, chunked, keep = None, False, version == b"HTTP/1.1"
        for line in self._header_lines(deadline):
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"content-length":
                length = self._number(value)
            elif name == b"transfer-encoding":
                chunked = value == b"chunked"
            elif name == b"connection":
                keep = value != b"close"
        return status, length, chunked, keep

    def _header_lines(self, deadline: float) -> Iterator[bytes]:
        read = 0
        while line := self._line(deadline):
            read += len(line)
            if read > _MAX_HEAD_BYTES:
                raise NotHttpError("the headers of the answer are too long")
            yield line

    @staticmethod
    def _number(text: bytes, base: int = 10) -> int:
        try:
            number = int(text.strip(), base)
        except ValueError:
            number = -1
        if not 0 <= number <= _MAX_BODY_BYTES:
            raise NotHttpError("the server does not speak HTTP")
        return number

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise NotHttpError("the server does not speak HTTP")
            self._buffer += self._receive(deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            self._buffer += self._receive(deadline)
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _read_to_end(self, deadline: float) -> bytes:
        with suppress(ConnectionResetError):
            while len(self._buffer) <= _MAX_BODY_BYTES:
                self._buffer += self._receive(deadline)
        return self._take(len(self._buffer), deadline)

    def _receive(self, deadline: float) -> bytes:
        self._socket.settimeout(_left(deadline))
        received = self._socket.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError("the connection was closed")
        self.received += len(received)
        return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Connections:
    """The connections of one process.

    Attributes:
        idle: Those that wait for a request. A deque's append and pop are atomic: no
            lock that a fork could leave locked.
        busy: Those in use, or being opened.
        ended: Wakes threads that pause when the client is closed.
    """

    def __init__(self) -> None:
        self.idle: dict[ClusterMember, deque[Connection]] = {}
        self.busy: set[Connection] = set()
        self.ended = threading.Event()


class Pool:
    """Connections that threads take and give back. A forked child opens its own.

    Attributes:
        context: The TLS settings.
        reached: A server has answered. If none ever has, the address may be mistyped,
            and a failure to connect is an error at once. One that has answered before
            may be restarting, and the request is tried again until its deadline.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.context = context
        self.reached = False
        self._closed = False
        self._by_process: dict[int, _Connections] = {}

    def check_open(self) -> None:
        """Raise if the client was closed."""
        if self._closed:
            raise EtcdError("the store was closed")

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the client is closed."""
        if not self._closed:
            self._own().ended.wait(seconds)

    def close(self) -> None:
        """End the blocked calls of all threads, and close the connections."""
        self._closed = True
        own = self._own()
        own.ended.set()
        for connection in list(own.busy):
            connection.abort()
        for idle in list(own.idle.values()):
            with suppress(IndexError):
                while True:
                    idle.pop().close()

    @contextmanager
    def open(self, member: ClusterMember, deadline: float) -> Iterator[Connection]:
        """Open a new connection, and close it at the end."""
        connection = self._connect(member, deadline)
        try:
            yield connection
        finally:
            self._own().busy.discard(connection)
            connection.close()

    def exchange(
        self,
        member: ClusterMember,
        verb: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        deadline: float,
    ) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of the answer.

        Raises:
            RequestFailed: There is no answer.
        """
        connection = self._take(member, deadline)
        with self._discarded_on_failure(connection, member):
            connection.write(verb, path, body, headers, deadline)
            answer = connection.read_answer(deadline)
        own = self._own()
        own.busy.discard(connection)
        idle = own.idle.setdefault(member, deque())
        if connection.reusable and len(idle) < _MAX_IDLE and not self._closed:
            idle.append(connection)
        else:
            connection.close()
        return answer

    def broken(self, member: ClusterMember, error: OSError, *, sent: bool) -> Failure:
        """Return the failure for a connection that could not be made, or broke."""
        # etcd closes a connection that speaks TLS where it does not, and vice versa.
        hint = "" if self.reached else _TLS_HINTS[member.secure]
        return connection_failure(str(member), error, sent=sent, hint=hint)

    def _take(self, member: ClusterMember, deadline: float) -> Connection:
        """Return an idle connection, or a new one."""
        self.check_open()
        own = self._own()
        idle = own.idle.setdefault(member, deque())
        with suppress(IndexError):
            while True:
                connection = idle.pop()
                if not connection.is_stale():
                    own.busy.add(connection)
                    return connection
                connection.close()
        return self._connect(member, deadline)

    def _connect(self, member: ClusterMember, deadline: float) -> Connection:
        context = self.context if member.secure else None
        connection = Connection(member.host, member.port, context)
        # Before it connects, so that close() can end that as well.
        self._own().busy.add(connection)
        with self._discarded_on_failure(connection, member):
            self.check_open()
            connection.connect(deadline)
        return connection

    @contextmanager
    def _discarded_on_failure(
        self, connection: Connection, member: ClusterMember
    ) -> Iterator[None]:
        """Close a connection that cannot be made, or breaks.

        Raises:
            RequestFailed: In place of an OSError.
        """
        try:
            yield
        except BaseException as error:
            self._own().busy.discard(connection)
            connection.close()
            if not isinstance(error, OSError) or raised_by_handler(error):
                raise
            self.check_open()
            # A server rejects a client's certificate after the first request.
            rejected = isinstance(error, ssl.SSLError) and not connection.received
            sent = connection.sent and not rejected
            raise RequestFailed(self.broken(member, error, sent=sent)) from error

    def _own(self) -> _Connections:
        """Return the connections of this process, and drop those of its parent."""
        process = os.getpid()
        own = self._by_process.get(process)
        if own is None:
            own = self._by_process.setdefault(process, _Connections())
            for other in list(self._by_process):
                if other != process:
                    # Only the child's copies are closed.
                    self._by_process.pop(other, None)
        return own
