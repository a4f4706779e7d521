"""The address of a running job's store: parsing, probing and reading it.

torch is imported only once a server has answered, so that a mistyped address is
reported immediately.
"""

import json
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from tracedstore.attach.child_process import (
    ChildTimeoutError,
    Heartbeat,
    run_in_child,
)
from tracedstore.attach.torch_import import interruptible_import
from tracedstore.core.errors import CommandError
from tracedstore.diagnosis import tcpstore_probe

if TYPE_CHECKING:
    from tracedstore.attach.snapshot import StoreSnapshot

T = TypeVar("T")

# Seconds until a server that does not answer is reported. With the start of Python and
# the last message that is less than five, on a busy machine too.
_ANSWER_TIMEOUT = 4.0
# Seconds for the first answer if importing torch has used up the timeout above.
_MIN_ANSWER_TIMEOUT = 2.0
# Seconds for each further answer; a large job needs many.
_READ_TIMEOUT = 3.0
_CONNECT_TIMEOUT = 2.5
ACCEPTED = "tcp://HOST:PORT, file:///PATH or etcd://HOST:PORT/PREFIX"
_TIMEOUT_CAUSES = {
    "tcp": "it hangs, or another server listens there",
    "file": "it is no FileStore, its disk hangs, or a process that hangs has locked it",
    "etcd": "it hangs, or another server listens there",
}

_imported = time.monotonic()


class Address:
    """The address of a job's store.

    Attributes:
        url: The address as it was given.
        scheme: ``tcp``, ``file`` or ``etcd``.
        host: The host, "" for a file.
        port: The port, 0 for a file.
        path: The file, or the prefix in etcd.
    """

    def __init__(self, url: str) -> None:
        """Parse an address; raise `CommandError` if it is invalid."""
        self.url = url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = SplitResult("", "", "", "", ""), None, None
        self.scheme = parts.scheme
        if parts.scheme == "file":
            self.path = parts.netloc + parts.path
        else:
            self.path = parts.path or "/"
        networked = parts.scheme in ("tcp", "etcd") and host and port
        if not (networked or (parts.scheme == "file" and self.path)):
            raise CommandError(f"--store is {url!r}; accepted is {ACCEPTED}")
        self.host, self.port = host or "", port or 0
        # The time of the first read includes the start of the command.
        self._started: float | None = _imported

    def probe(self) -> None:
        """Check the store as far as possible without torch, within 4 seconds.

        Raises:
            CommandError: There is no store, or another server answers.
        """
        self.run(_ANSWER_TIMEOUT, lambda _: self.check_reachable())

    def read_snapshot(
        self, select: Callable[[Sequence[str]], list[str]]
    ) -> "StoreSnapshot":
        """Read the store as one more client, in bounded time and without writing.

        Args:
            select: Returns the keys whose values are read.

        Raises:
            CommandError: There is no store, another server answers, or it does not
                answer in time.
        """
        # Before the fork, so that the next child has torch too.
        with interruptible_import():
            from tracedstore.attach.snapshot import StoreSnapshot  # noqa: PLC0415
            from tracedstore.attach.store_connection import connect  # noqa: PLC0415

        now = time.monotonic()
        started, self._started = self._started or now, None
        remaining = started + _ANSWER_TIMEOUT - now

        def read(heartbeat: Heartbeat) -> StoreSnapshot:
            with ExitStack() as connections:

                def reconnect() -> Any:
                    return connections.enter_context(connect(self))

                store = reconnect()
                heartbeat()
                return StoreSnapshot.take(store, select, heartbeat, reconnect)

        return self.run(max(remaining, _MIN_ANSWER_TIMEOUT), read, _READ_TIMEOUT)

    def run(
        self,
        timeout: float,
        work: Callable[[Heartbeat], T],
        heartbeat_timeout: float = 0.0,
    ) -> T:
        """Run work that connects to the store in a child, as `run_in_child` does.

        Raises:
            CommandError: The work raised one, or took too long.
        """
        store = f"the store at {self.url}"
        try:
            return run_in_child(timeout, work, heartbeat_timeout)
        except ChildTimeoutError as error:
            if error.made_progress:
                raise CommandError(
                    f"{store} answered, and then not for {heartbeat_timeout:g} s: it is"
                    " overloaded, or hangs"
                ) from None
            raise CommandError(
                f"{store} does not answer within {timeout:.1f} s:"
                f" {_TIMEOUT_CAUSES[self.scheme]}"
            ) from None
        except ChildProcessError as error:
            raise CommandError(
                f"{store} cannot be read: the process that reads it {error}"
            ) from None

    def check_reachable(self) -> None:
        """Check that the store is there; torch reports that in many lines.

        Raises:
            CommandError: There is no store, or another server answers.
        """
        if self.scheme == "file":
            self._check_file()
            return
        with self._connect() as connection:
            if self.scheme == "tcp" and tcpstore_probe.probe(connection) is False:
                raise self.not_a_tcpstore()
        if self.scheme == "etcd":
            self._check_etcd_v2()

    def unreadable(self, reason: str | None) -> CommandError:
        """Return the error for a file that cannot be read."""
        return CommandError(
            f"the store at {self.url} cannot be read: {self.path}: {reason}"
        )

    def not_a_tcpstore(self) -> CommandError:
        """Return the error for another server at a tcp:// address."""
        return CommandError(
            f"the server at {self.url} does not answer as a TCPStore does: it is"
            " another server, or the TCPStore of another torch"
        )

    def not_an_etcd(self) -> CommandError:
        """Return the error for another server at an etcd:// address."""
        return CommandError(
            f"the server at {self.url} does not answer as an etcd with the v2 API does"
        )

    def _check_file(self) -> None:
        try:
            kind = stat.S_IFMT(Path(self.path).stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise self.unreadable("Not a regular file")
            Path(self.path).open("rb").close()
        except OSError as error:
            raise self.unreadable(error.strerror) from None

    def _connect(self) -> socket.socket:
        message = f"the store at {self.url} cannot be reached:"
        try:
            connection = socket.create_connection(
                (self.host, self.port), timeout=_CONNECT_TIMEOUT
            )
        except socket.gaierror:
            raise CommandError(
                f"{message} the host name {self.host!r} cannot be resolved"
            ) from None
        except ConnectionRefusedError:
            raise CommandError(
                f"{message} nothing listens there; is the job still running?"
            ) from None
        except (OSError, UnicodeError) as error:
            raise CommandError(
                f"{message} {getattr(error, 'strerror', None) or error}"
            ) from None
        # The parent process times out a server that does not answer.
        connection.settimeout(None)
        return connection

    def _check_etcd_v2(self) -> None:
        # Without a timeout, for the same reason.
        try:
            with closing(HTTPConnection(self.host, self.port)) as connection:
                connection.request("GET", "/v2/keys")
                json.loads(connection.getresponse().read())["action"]
        except (OSError, HTTPException, ValueError, TypeError, KeyError):
            raise self.not_an_etcd() from None
