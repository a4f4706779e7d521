"""Counts round trips to a TCPStore on the wire.

How often a call waits for a response depends on torch: a ``set`` does not wait, a
``get`` waits twice. So a relay between the clients and the server counts the server's
responses.
"""

import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from tracedstore.recording.store_proxy import RECORDED


class RelayedConnection:
    """One connection through the relay.

    Attributes:
        round_trips: How often the server sent data after the client had. The client has
            one call in flight at a time, so it waited for each of these responses.
    """

    def __init__(self) -> None:
        self.round_trips = 0
        self._client_sent = False

    def count(self, data: bytes, *, client: bool) -> None:  # noqa: ARG002 - for others
        """Count data that the client or the server has sent."""
        if client:
            self._client_sent = True
        elif self._client_sent:
            self._client_sent = False
            self.round_trips += 1


class Relay:
    """Forwards data between clients and a server.

    Args:
        server_port: The port of the server.
        new_connection: Creates what counts a connection.

    Attributes:
        port: The port for clients.
        connections: The connections, in the order in which they were accepted.
    """

    def __init__(
        self,
        server_port: int,
        new_connection: Callable[[], RelayedConnection] = RelayedConnection,
    ) -> None:
        self._server_port = server_port
        self._new_connection = new_connection
        self._selector = selectors.DefaultSelector()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._stopped = False
        self.port: int = self._listening.getsockname()[1]
        self.connections: list[RelayedConnection] = []

    def run(self) -> None:
        """Forward data until `stop` is called."""
        while not self._stopped:
            for ready, _ in self._selector.select(timeout=0.1):
                if ready.data is None:
                    self._accept()
                else:
                    self._forward(ready.fileobj, *ready.data)

    def stop(self) -> None:
        """Make `run` return within 0.1 s."""
        self._stopped = True

    def close(self) -> None:
        """Close every connection."""
        for ready in list(self._selector.get_map().values()):
            assert isinstance(ready.fileobj, socket.socket)
            ready.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(("127.0.0.1", self._server_port))
        connection = self._new_connection()
        self.connections.append(connection)
        for own, other, is_client in ((client, server, True), (server, client, False)):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(
                own, selectors.EVENT_READ, (other, connection, is_client)
            )

    def _forward(
        self,
        source: Any,
        other: socket.socket,
        connection: RelayedConnection,
        is_client: bool,
    ) -> None:
        data = source.recv(1 << 20)
        if not data:
            for end in (source, other):
                self._selector.unregister(end)
                end.close()
            return
        # Before it is forwarded, so that a client with a response finds it counted.
        connection.count(data, client=is_client)
        other.sendall(data)


@contextmanager
def relay(
    server_port: int,
    new_connection: Callable[[], RelayedConnection] = RelayedConnection,
) -> Iterator[Relay]:
    """Run a relay to a server in a thread."""
    running_relay = Relay(server_port, new_connection)
    thread = threading.Thread(target=running_relay.run)
    thread.start()
    try:
        yield running_relay
    finally:
        running_relay.stop()
        thread.join()
        running_relay.close()


class CountingStore(Store):
    """A client of a TCPStore through a relay; it counts its calls.

    Attributes:
        connection: The connection through the relay.
        calls: The number of calls by operation.
        round_trips_before_set: The round trips before each key was first set.
    """

    def __init__(self, through: Relay) -> None:
        super().__init__()
        self._inner: Any = dist.TCPStore(
            "127.0.0.1", through.port, None, is_master=False
        )
        # Stores are created one at a time, so the newest connection is this one's.
        self.connection = through.connections[-1]
        self.calls: Counter[str] = Counter()
        self.round_trips_before_set: dict[str, int] = {}

    def has_extended_api(self) -> bool:
        """Return what the TCPStore returns."""
        extended: bool = self._inner.has_extended_api()
        return extended


def _counted(name: str) -> Callable[..., Any]:
    def method(self: CountingStore, *args: Any) -> Any:
        self.calls[name] += 1
        if name == "set":
            self.round_trips_before_set.setdefault(args[0], self.connection.round_trips)
        return getattr(self._inner, name)(*args)

    return method


for _name in RECORDED:
    setattr(CountingStore, _name, _counted(_name))
