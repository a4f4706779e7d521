"""An HTTP server that a slow, stuck or hostile client cannot make expensive.

It runs inside a training job, so everything is bounded: concurrent connections,
connections a second, the bytes of a request and its duration. A connection over a
bound is closed without a response.
"""

import errno
import functools
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from tracedstore import names
from tracedstore.common.text import host_port
from tracedstore.common.threads import DaemonThread
from tracedstore.recording.recorder import RECORDER

_MAX_CONNECTIONS = 8
# Seconds between two connections: this bounds the processor time.
_ACCEPT_INTERVAL = 0.004
# Bytes of a request line and its headers together.
_MAX_REQUEST_BYTES = 16 * 1024
# Seconds for one read of a request, and for the request with its response.
_READ_TIMEOUT = 5.0
_REQUEST_TIMEOUT = 15.0
# Number of ports that are tried, from the configured one on.
_MAX_PORTS = 128

# What a response that refuses credentials has in WWW-Authenticate. Each has a header of
# its own: Chromium reads only the first one of a header, and asks for none if it does
# not know that.
CHALLENGES = ('Basic realm="tracedstore"', "Bearer")
# Characters of a Host header: a name or an address, and a port.
_AUTHORITY = re.compile(r"[\w.:%\[\]-]+", re.ASCII)
# The kubelet writes the domains of the cluster into it.
_RESOLV_CONF = Path("/etc/resolv.conf")
# All addresses of IPv6, and of IPv4 too.
_ANY_IPV6 = "::"
_ANY_IPV4 = "0.0.0.0"  # noqa: S104 - only where it is configured
# Errors of a machine without IPv6.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# Addresses that mean every interface; clients cannot connect to them.
ANY_ADDRESS = (_ANY_IPV6, _ANY_IPV4, "")


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


# Returns the response, from the Accept header of the request.
Page = Callable[[str], Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Authentication and TLS.

    Attributes:
        tls: For HTTPS, and for client certificates if it requires them.
        credentials: Returns whether an Authorization header is valid; None to accept
            any request.
        open_pages: Paths that need no credentials.
        hosts: Further names that are accepted in the Host header.
    """

    tls: ssl.SSLContext | None = None
    credentials: Callable[[str], bool] | None = None
    open_pages: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    def accepts_host(self, header: str | None) -> bool:
        """Return whether a Host header names this server.

        A page of another site in the user's browser can make requests here if its
        name resolves to this address (DNS rebinding). Its Host header has that name.
        """
        if header is None:  # not a browser
            return True
        if not _AUTHORITY.fullmatch(header):
            return False
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:  # brackets that are not closed
            return False
        return (
            name in {"localhost", *self.hosts}
            or _is_ip_address(name)
            or name in _own_names()
            or name.endswith(_service_domains())
        )

    @staticmethod
    def accepts_origin(origin: str | None, host: str | None) -> bool:
        """Return whether a request comes from a page of this server.

        A browser lets the pages of all sites open websockets here. Their Origin header
        has the name of the site.
        """
        if origin is None:  # not a browser
            return True
        own = (host or "").lower()
        return origin.lower() in {f"http://{own}", f"https://{own}"}


def base_url(host: str, port: int, *, secure: bool) -> str:
    """Return the URL at which clients reach a server, without a path."""
    name = socket.gethostname() if host in ANY_ADDRESS else host
    return f"{'https' if secure else 'http'}://{host_port(name, port)}"


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names of this machine; the full one may take a name lookup."""
    own = socket.gethostname().lower()
    full = socket.getfqdn().lower()
    return frozenset({own, own.partition(".")[0], full, *_names_of_pod(full)})


def _names_of_pod(full: str) -> list[str]:
    """Return the shorter names of a pod: of ``a.b.team.svc.cluster.local``, four."""
    name, svc, _ = full.partition(".svc.")
    if not svc:
        return []
    labels = name.split(".")
    shorter = [".".join(labels[:count]) for count in range(2, len(labels) + 1)]
    return [f"{name}.svc", *shorter]


@functools.cache
def _service_domains() -> tuple[str, ...]:
    """Return how names of Services end in the cluster of this pod; () in no pod.

    Only the DNS of the cluster answers for them. A web site outside has no such name,
    so that accepting all of them keeps the protection.
    """
    try:
        lines = _RESOLV_CONF.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    words = [line.lower().split() for line in lines]
    searched = [name for line in words if line[:1] == ["search"] for name in line[1:]]
    domains = [f".{name.rstrip('.')}" for name in searched if name.startswith("svc.")]
    return (".svc", *domains) if domains else ()


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Server:
    """Serves pages in daemon threads until it is stopped.

    Attributes:
        port: The port it listens at.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        host: str,
        port: int,
        access: Access | None = None,
    ) -> None:
        """Listen at the port, or at the next free one.

        Raises:
            OSError: No port is free, or the host is not an address of this machine.
            RuntimeError: No thread can be started.
        """
        self._listener = _listen(pages, host, port, access or Access())
        self.port: int = self._listener.server_address[1]
        self._thread = DaemonThread(
            self._listener.serve_forever, name="tracedstore-http"
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.server_close()
            raise

    def stop(self, timeout: float) -> None:
        """Stop listening; requests in progress end by their own timeout."""
        self._listener.stopping = True
        # shutdown() waits for the server's thread, which may be gone at exit.
        stopping = DaemonThread(self._listener.shutdown)
        with suppress(RuntimeError):
            stopping.start()
            stopping.join(timeout)
        self._listener.server_close()

    def reset(self) -> None:
        """Close the socket in a forked child: the port is the parent's."""
        self._listener.socket.close()


def _listen(
    pages: Mapping[str, Page], host: str, port: int, access: Access
) -> "_Listener":
    ports = [0] if port == 0 else range(port, min(port + _MAX_PORTS, 65536))
    for number in ports:
        try:
            return _Listener(pages, host, number, access)
        except OSError as error:
            taken = error
            if error.errno != errno.EADDRINUSE:
                break
    if host == _ANY_IPV6 and taken.errno in _NO_IPV6:
        return _listen(pages, _ANY_IPV4, port, access)
    raise taken


class _Listener(TCPServer):
    # A port in use stays taken; this only skips the pause after it was closed.
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, pages: Mapping[str, Page], host: str, port: int, access: Access
    ) -> None:
        self.pages = pages
        self.access = access
        self.stopping = False
        self._open: dict[int, tuple[float, socket.socket]] = {}
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Bind the address; that of all IPv6 addresses has those of IPv4 too."""
        if self.address_family == socket.AF_INET6:
            # Without it, a setting of the machine decides.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it if there are too many."""
        time.sleep(_ACCEPT_INTERVAL)
        with self._lock:
            full = len(self._open) >= _MAX_CONNECTIONS
            if not full:
                self._open[id(request)] = (time.monotonic(), request)
        if full:
            self.shutdown_request(request)
            return
        try:
            DaemonThread(
                self._serve, request, client_address, name="tracedstore-http-request"
            ).start()
        except RuntimeError:  # the limit is reached, or the process ends
            self._end(request, request)

    def service_actions(self) -> None:
        """Close connections that take too long; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for began, connection in self._open.values():
                if now - began > _REQUEST_TIMEOUT:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        connection = request
        try:
            request.settimeout(_READ_TIMEOUT)
            if self.access.tls is not None:
                connection = secured = self.access.tls.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
                with self._lock:
                    began, _ = self._open[id(request)]
                    self._open[id(request)] = (began, secured)
                secured.do_handshake()
            self.finish_request(connection, client_address)
        except Exception:  # noqa: S110
            # The client is gone, too slow or too verbose, or speaks neither TLS nor
            # HTTP. That is no reason to write to the job's standard error.
            pass
        finally:
            self._end(request, connection)

    def _end(self, request: socket.socket, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        self.shutdown_request(connection)

    def server_close(self) -> None:
        """Close the port and all connections."""
        super().server_close()
        with self._lock:
            for _, connection in self._open.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    server: _Listener
    server_version = "tracedstore"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("Any", _Limited(cast("Any", self.rfile)))

    def do_GET(self) -> None:
        """Send the page."""
        access = self.server.access
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        given = self.headers.get("Authorization", "")
        if not access.accepts_host(self.headers.get("Host")):
            self._send(
                Response(
                    b"unknown name in the Host header: set TRACEDSTORE_HTTP_HOSTS\n",
                    status=HTTPStatus.MISDIRECTED_REQUEST,
                )
            )
        elif path not in access.open_pages and not (
            access.credentials is None or access.credentials(given)
        ):
            self._send(
                Response(b"credentials needed\n", status=HTTPStatus.UNAUTHORIZED)
            )
        elif page is None:
            known = "\n".join(sorted(self.server.pages))
            self._send(
                Response(f"there is:\n{known}\n".encode(), status=HTTPStatus.NOT_FOUND)
            )
        else:
            self._send(_render(page, self.headers.get("Accept", "")))

    do_HEAD = do_GET  # noqa: N815 - http.server requires this name

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        if response.status == HTTPStatus.UNAUTHORIZED:
            for challenge in CHALLENGES:
                self.send_header("WWW-Authenticate", challenge)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, *_args: Any) -> None:
        """Log nothing: standard error is the job's."""


def _render(page: Page, accept: str) -> Response:
    try:
        return page(accept)
    except Exception as error:
        RECORDER.failures.add(names.ENDPOINT, error)
        return Response(b"failed\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)


class _Limited:
    """A stream that raises after a number of bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = _MAX_REQUEST_BYTES

    def readline(self, size: int = -1) -> bytes:
        line = self._stream.readline(min(size, self._left) if size > 0 else self._left)
        self._left -= len(line)
        if self._left <= 0:
            raise ConnectionAbortedError("the request is too long")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
