"""Count round trips to a TCPStore where they happen: on the wire.

What waits for an answer is for torch to decide, and is not what one would think: a
``set`` does not, a ``get`` does twice. So nothing is assumed here: a relay stands
between the clients and the server, and counts how often the server answers.
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

from tracedstore.core.store_proxy import RECORDED


class Line:
    """One connection through the relay.

    Attributes:
        round_trips: How often the server answered after the client had spoken. The
            client has one call under way at a time, so each of these was waited for.
    """

    def __init__(self) -> None:
        self.round_trips = 0
        self._asked = False

    def heard(self, *, client: bool) -> None:
        """Take note of who spoke."""
        if client:
            self._asked = True
        elif self._asked:
            self._asked = False
            self.round_trips += 1


class Relay:
    """Passes on what clients and server say.

    Attributes:
        port: Where clients connect.
        lines: Their connections, in the order in which they came.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._selector = selectors.DefaultSelector()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._ended = False
        self.port: int = self._listening.getsockname()[1]
        self.lines: list[Line] = []

    def run(self) -> None:
        """Pass on until told to stop."""
        while not self._ended:
            for ready, _ in self._selector.select(timeout=0.1):
                if ready.data is None:
                    self._accept()
                else:
                    self._pass_on(ready.fileobj, *ready.data)

    def stop(self) -> None:
        """Stop within a moment."""
        self._ended = True

    def close(self) -> None:
        """Close every connection."""
        for ready in list(self._selector.get_map().values()):
            assert isinstance(ready.fileobj, socket.socket)
            ready.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(("127.0.0.1", self._server_port))
        line = Line()
        self.lines.append(line)
        for own, other, is_client in ((client, server, True), (server, client, False)):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(own, selectors.EVENT_READ, (other, line, is_client))

    def _pass_on(
        self, source: Any, other: socket.socket, line: Line, is_client: bool
    ) -> None:
        said = source.recv(1 << 20)
        if not said:
            for end in (source, other):
                self._selector.unregister(end)
                end.close()
            return
        # Counted before it is passed on: who has an answer finds it counted.
        line.heard(client=is_client)
        other.sendall(said)


@contextmanager
def relay(server_port: int) -> Iterator[Relay]:
    """Relay to a server, in a thread."""
    found = Relay(server_port)
    running = threading.Thread(target=found.run)
    running.start()
    try:
        yield found
    finally:
        found.stop()
        running.join()
        found.close()


class CountingStore(Store):
    """A TCPStore through a relay that counts its calls, too.

    Attributes:
        line: Its connection.
        calls: Its calls, by name.
        before: How many round trips there had been when a key was first set.
    """

    def __init__(self, through: Relay) -> None:
        super().__init__()
        self._inner: Any = dist.TCPStore(
            "127.0.0.1", through.port, None, is_master=False
        )
        # One at a time: the newest connection is this one's.
        self.line = through.lines[-1]
        self.calls: Counter[str] = Counter()
        self.before: dict[str, int] = {}

    def has_extended_api(self) -> bool:
        """Say what the TCPStore says."""
        answer: bool = self._inner.has_extended_api()
        return answer


def _counted(name: str) -> Callable[..., Any]:
    def method(self: CountingStore, *args: Any) -> Any:
        self.calls[name] += 1
        if name == "set":
            self.before.setdefault(args[0], self.line.round_trips)
        return getattr(self._inner, name)(*args)

    return method


for _name in RECORDED:
    setattr(CountingStore, _name, _counted(_name))
