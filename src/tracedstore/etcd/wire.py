"""HTTP/1.1 over one socket, with a deadline for each answer.

``http.client`` would serve, but its timeout is for each read of the socket and not for
the answer.
"""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.text import host_port

_READ_BYTES = 65_536
_MAX_HEAD_BYTES = 65_536
# Bounds what a broken server can make a job allocate.
_MAX_BODY_BYTES = 256 * 1024 * 1024
# Seconds until a host that vanished without a word is noticed: idle, interval, count.
_KEEPALIVE = (10, 5, 3)


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
