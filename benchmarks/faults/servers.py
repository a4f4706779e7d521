"""The servers of a case: a TCPStore, a proxy in front of it, and an OTLP collector."""

import os
import selectors
import socket
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NoReturn

import torch.distributed as dist

from faults.processes import Channel

# Seconds that a slow collector takes for a response.
_SLOW_RESPONSE = 1.0
_BUFFER = 65536


def serve_tcp(channel: Channel, port: int) -> NoReturn:
    """Serve a TCPStore until this process is killed."""
    deadline = time.monotonic() + 10
    while True:
        try:
            store = dist.TCPStore(
                "127.0.0.1", port, None, is_master=True, wait_for_workers=False
            )
            break
        except (dist.DistNetworkError, RuntimeError):
            # The killed server's socket may not be released yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    channel.send("port", port=store.port)
    while channel.wait():
        pass
    os._exit(0)


class Proxy:
    """Forwards connections to a server, and cuts, delays or holds them.

    Modes: ``forward``, ``delay SECONDS``, ``hold`` (a black hole), ``cut``,
    ``half_close_server`` and ``half_close_client``, which end one direction.
    """

    def __init__(self, channel: Channel, control: int, target: int) -> None:
        self._channel = channel
        self._control = control
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: dict[socket.socket, socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._due: list[tuple[float, socket.socket, bytes]] = []
        self._held = False
        self._delay = 0.0

    def serve(self) -> NoReturn:
        """Forward until this process is killed."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._channel.send("port", port=self._listener.getsockname()[1])
        while True:
            timeout = None
            if self._due and not self._held:
                timeout = max(0.0, self._due[0][0] - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj == self._control:
                    command = os.read(self._control, _BUFFER).decode()
                    if not command:
                        os._exit(0)
                    self._set_mode(*command.split())
                    self._channel.send("mode", mode=command)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            self._write_due()

    def _set_mode(self, mode: str, seconds: str = "0") -> None:
        self._held = mode == "hold"
        self._delay = float(seconds) if mode == "delay" else 0.0
        if mode == "cut":
            while self._peers:
                self._close(next(iter(self._peers)))
        elif mode.startswith("half_close"):
            for connection in list(self._peers):
                if (connection in self._servers) == (mode == "half_close_server"):
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket()
        try:
            server.connect(("127.0.0.1", self._target))
        except OSError:
            client.close()
            server.close()
            return
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ)
        self._peers[client], self._peers[server] = server, client
        self._servers.add(server)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._peers:
            return
        try:
            data = connection.recv(_BUFFER)
        except OSError:
            data = b""
        # An end of a connection is delivered like its data.
        due = time.monotonic() + self._delay
        self._due.append((due, connection, data))
        if not data:
            self._selector.unregister(connection)

    def _write_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and not self._held:
            _, source, data = self._due.pop(0)
            if source not in self._peers:
                continue
            try:
                if not data:
                    raise ConnectionResetError
                self._peers[source].sendall(data)
            except OSError:
                self._close(source)

    def _close(self, connection: socket.socket) -> None:
        peer = self._peers.pop(connection)
        self._peers.pop(peer, None)
        for end in (connection, peer):
            with suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()


class _SlowHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        time.sleep(_SLOW_RESPONSE)  # the fault itself
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Log nothing."""


def serve_slow_collector(channel: Channel) -> NoReturn:
    """Respond to OTLP exports, each after a second."""
    server = HTTPServer(("127.0.0.1", 0), _SlowHandler)
    channel.send("port", port=server.server_address[1])
    server.serve_forever()
    os._exit(0)


def refusing_socket() -> socket.socket:
    """Return a socket whose port refuses connections while it is open."""
    refusing = socket.socket()
    refusing.bind(("127.0.0.1", 0))
    return refusing


def hang_clients(port: int, count: int) -> list[socket.socket]:
    """Connect clients that send half a request and nothing more."""
    clients = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(count)]
    for client in clients:
        with suppress(OSError):  # the endpoint closes connections over its limit
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
    return clients
