"""The network between the members of an etcd cluster, from which one can be cut off."""

import re
import socket
import threading
from contextlib import suppress

_BUFFER = 65_536
# Each member sends its id in the requests to the others.
_SENDER = re.compile(rb"x-server-from: *([0-9a-f]+)", re.IGNORECASE)


class PeerNetwork:
    """Forwards the connections between members.

    A cut-off member loses what it sends and what is sent to it. No connection is
    closed, as in a network that drops packets.
    """

    def __init__(self) -> None:
        self._isolated = ""
        self._changed = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._names: dict[int, str] = {}

    def add(self, port: int) -> int:
        """Return a port that forwards to the port of a member."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept, args=(listener, port), daemon=True
        ).start()
        return int(listener.getsockname()[1])

    def isolate(self, member: str, port: int) -> None:
        """Cut a member off.

        Args:
            member: Its id, in hexadecimal digits.
            port: Its port.
        """
        with self._changed:
            self._isolated = member
            self._names[port] = member

    def heal(self) -> None:
        """End the cut. What was not delivered in the meantime is."""
        with self._changed:
            self._isolated = ""
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more connections."""
        self.heal()
        for listener in self._listeners:
            # Wakes the thread that accepts.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(
                    target=self._forward, args=(client, port), daemon=True
                ).start()

    def _forward(self, client: socket.socket, port: int) -> None:
        with client, suppress(OSError):
            head = client.recv(_BUFFER)
            found = _SENDER.search(head)
            sender = found[1].decode() if found else ""
            self._wait(sender, port)
            with socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(head)
                back = threading.Thread(
                    target=self._pump, args=(server, client, sender, port), daemon=True
                )
                back.start()
                self._pump(client, server, sender, port)
                back.join()

    def _pump(
        self, source: socket.socket, target: socket.socket, sender: str, port: int
    ) -> None:
        with suppress(OSError):
            while data := source.recv(_BUFFER):
                self._wait(sender, port)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, sender: str, port: int) -> None:
        """Wait while one end of a connection is cut off."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._isolated
                    or self._isolated not in (sender, self._names.get(port))
                )
            )
