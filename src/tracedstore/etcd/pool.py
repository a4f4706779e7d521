"""The connections of one client to the members of a cluster."""

import os
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.endpoints import Endpoint
from tracedstore.etcd.etcd_errors import (
    EtcdError,
    Failure,
    RequestFailed,
    connection_failure,
)
from tracedstore.etcd.wire import Connection

_MAX_IDLE = 8
_TLS_HINTS = {
    False: "; if it speaks TLS, use https:// or the TLS settings",
    True: "; if it does not speak TLS, use http://",
}


class _Connections:
    """The connections of one process.

    Attributes:
        idle: Those that wait for a request. A deque's append and pop are atomic: no
            lock that a fork could leave locked.
        busy: Those in use, or being opened.
        ended: Wakes threads that pause when the client is closed.
    """

    def __init__(self) -> None:
        self.idle: dict[Endpoint, deque[Connection]] = {}
        self.busy: set[Connection] = set()
        self.ended = threading.Event()


class Pool:
    """Connections that threads take and give back. A forked child opens its own.

    Attributes:
        context: The TLS settings.
        reached: A server has answered. Nothing listens at a mistyped address: that is
            an error at once. A server that has answered before may be restarting.
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
    def open(self, endpoint: Endpoint, deadline: float) -> Iterator[Connection]:
        """Open a new connection, and close it at the end."""
        connection = self._connect(endpoint, deadline)
        try:
            yield connection
        finally:
            self._own().busy.discard(connection)
            connection.close()

    def exchange(
        self,
        endpoint: Endpoint,
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
        connection = self._take(endpoint, deadline)
        with self._discarded_on_failure(connection, endpoint):
            connection.write(verb, path, body, headers, deadline)
            answer = connection.read_answer(deadline)
        own = self._own()
        own.busy.discard(connection)
        idle = own.idle.setdefault(endpoint, deque())
        if connection.reusable and len(idle) < _MAX_IDLE and not self._closed:
            idle.append(connection)
        else:
            connection.close()
        return answer

    def broken(self, endpoint: Endpoint, error: OSError, *, sent: bool) -> Failure:
        """Return the failure for a connection that could not be made, or broke."""
        # etcd closes a connection that speaks TLS where it does not, and vice versa.
        hint = "" if self.reached else _TLS_HINTS[endpoint.secure]
        return connection_failure(str(endpoint), error, sent=sent, hint=hint)

    def _take(self, endpoint: Endpoint, deadline: float) -> Connection:
        """Return an idle connection, or a new one."""
        self.check_open()
        own = self._own()
        idle = own.idle.setdefault(endpoint, deque())
        with suppress(IndexError):
            while True:
                connection = idle.pop()
                if not connection.is_stale():
                    own.busy.add(connection)
                    return connection
                connection.close()
        return self._connect(endpoint, deadline)

    def _connect(self, endpoint: Endpoint, deadline: float) -> Connection:
        context = self.context if endpoint.secure else None
        connection = Connection(endpoint.host, endpoint.port, context)
        # Before it connects, so that close() can end that as well.
        self._own().busy.add(connection)
        with self._discarded_on_failure(connection, endpoint):
            self.check_open()
            connection.connect(deadline)
        return connection

    @contextmanager
    def _discarded_on_failure(
        self, connection: Connection, endpoint: Endpoint
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
            raise RequestFailed(self.broken(endpoint, error, sent=sent)) from error

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
