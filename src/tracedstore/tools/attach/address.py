"""The address of a running job's store: parsing, probing and reading it.

torch is imported only once a server has answered, so that a mistyped address is
reported immediately.
"""

import json
import signal
import socket
import ssl
import stat
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from tracedstore import names
from tracedstore.common import causes
from tracedstore.common.errors import CommandError, UsageError
from tracedstore.diagnosis.connection import connection_attempt
from tracedstore.tools.attach.child_process import (
    ChildTimeoutError,
    Heartbeat,
    run_in_child,
)

if TYPE_CHECKING:
    from tracedstore.tools.attach.store_snapshot import StoreSnapshot

T = TypeVar("T")

# Seconds until a server that does not answer is reported. With the start of Python and
# the last message that is less than five, on a busy machine too.
_ANSWER_TIMEOUT = 4.0
# Seconds for the first answer if importing torch has used up the timeout above.
_MIN_ANSWER_TIMEOUT = 2.0
# Seconds for each further answer; a large job needs many.
_READ_TIMEOUT = 3.0
_CONNECT_TIMEOUT = 2.5
ACCEPTED = (
    "HOST:PORT, tcp://HOST:PORT, file:///PATH, etcd://HOST:PORT/PREFIX or, for TLS,"
    " etcds://HOST:PORT/PREFIX"
)
_TLS_SCHEME = "etcds"
_TIMEOUT_CAUSES = {
    "tcp": "it hangs, or another server listens there",
    "file": "it is no FileStore, its disk hangs, or a process that hangs has locked it",
    "etcd": "it hangs, or another server listens there",
}

_imported = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """How to log in to etcd: the files for TLS, and the user.

    They are named as in ``--rdzv-conf``.

    Attributes:
        ca_cert: The certificate of the authority that signed the server's.
        ssl_cert: The client's certificate.
        ssl_cert_key: The key of the client's certificate.
        user: The user; "" without one.
        password: The password of the user.
    """

    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    def context(self) -> ssl.SSLContext:
        """Read the files. Imports torch.

        Raises:
            ConfigurationError: One cannot be used.
        """
        from tracedstore.etcd import Tls  # noqa: PLC0415 - imports torch

        return Tls(
            ca_cert=self.ca_cert, cert=self.ssl_cert, key=self.ssl_cert_key
        ).context()


class Address:
    """The address of a job's store.

    Attributes:
        url: The address as it was given.
        scheme: ``tcp``, ``file`` or ``etcd``.
        secure: Whether it is an etcd that is reached over TLS.
        access: The files for TLS, and the user.
        host: The host, "" for a file.
        port: The port, 0 for a file.
        path: The file, or the prefix in etcd.
        namespace: The namespace of an EtcdV3Store, "" if it is another store; known
            after `check_reachable`.
        has_answered: It has answered `check_reachable` as such a store does.
    """

    def __init__(self, url: str, access: EtcdAccess | None = None) -> None:
        """Parse an address; raise `UsageError` if it is invalid."""
        # As torchrun takes it with --rdzv-endpoint.
        url = url if "://" in url or ":" not in url else f"tcp://{url}"
        self.url = url
        self.access = access or EtcdAccess()
        if "@" in url.partition("://")[2].partition("/")[0]:
            # It may have a password, so it is not in the text.
            raise UsageError(
                "--store has a user in its address; use --etcd-user and"
                " --etcd-password-file"
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = SplitResult("", "", "", "", ""), None, None
        self.secure = parts.scheme == _TLS_SCHEME
        self.scheme = "etcd" if self.secure else parts.scheme
        if parts.scheme == "file":
            self.path = parts.netloc + parts.path
        else:
            self.path = parts.path or "/"
        networked = self.scheme in ("tcp", "etcd") and host and port
        if not (networked or (parts.scheme == "file" and self.path)):
            raise UsageError(f"--store is {url!r}; accepted is {ACCEPTED}")
        self.host, self.port = host or "", port or 0
        self.namespace = ""
        self.has_answered = False
        # The time of the first read includes the start of the command.
        self._started: float | None = _imported

    def probe(self) -> None:
        """Check the store as far as possible without torch, within 4 seconds.

        Raises:
            CommandError: There is no store, or another server answers.
        """

        def look(_heartbeat: Heartbeat) -> bool:
            self.check_reachable()
            return self.has_answered

        # It is found in a child, which cannot set it here.
        self.has_answered = self.run(_ANSWER_TIMEOUT, look)

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
            from tracedstore.tools.attach.store_snapshot import StoreSnapshot, connect  # noqa: PLC0415

        now = time.monotonic()
        started, self._started = self._started or now, None
        remaining = started + _ANSWER_TIMEOUT - now
        # A server that has answered is slow at worst, and so may this machine be.
        known = self.has_answered or self.scheme == "file"
        minimum = _ANSWER_TIMEOUT if known else _MIN_ANSWER_TIMEOUT

        def read(heartbeat: Heartbeat) -> StoreSnapshot:
            with connect(self) as store:
                heartbeat()
                return StoreSnapshot.take(store, select, heartbeat)

        return self.run(max(remaining, minimum), read, _READ_TIMEOUT)

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
            cause = _TIMEOUT_CAUSES[self.scheme]
            if self.has_answered:
                kind = "TCPStore" if self.scheme == "tcp" else "etcd"
                cause = f"it has answered as a {kind} does: it is overloaded, or hangs"
            raise CommandError(
                f"{store} does not answer within {timeout:.1f} s: {cause}"
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
            if self.scheme == "tcp":
                answers = connection_attempt.probe_tcpstore(connection)
                if answers is False:
                    raise self.not_a_tcpstore()
                self.has_answered = answers is True
        # The client for TLS and users needs torch.
        if self.scheme == "etcd" and not (self.secure or self.access.user):
            self.find_namespace(self._count_keys)
            self.has_answered = True

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

    def overloaded(self, seconds: float) -> CommandError:
        """Return the error for a TCPStore that does not answer torch's client."""
        return CommandError(
            f"the store at {self.url} has answered as a TCPStore does, and then not"
            f" within {seconds:g} s: it is overloaded, or hangs"
        )

    def not_an_etcd(self) -> CommandError:
        """Return the error for another server at an etcd:// address."""
        return CommandError(f"the server at {self.url} does not answer as an etcd does")

    def find_namespace(self, count_keys: Callable[[str], int | None]) -> None:
        """Find out which API the store of a job uses: the one that has its keys.

        Args:
            count_keys: Returns the number of keys below a prefix; None without the v3
                API.

        Raises:
            CommandError: Neither API has them.
        """
        root = names.ETCD_ROOT
        namespace = self.path.strip("/").removeprefix(root.lstrip("/"))
        found = count_keys(f"{root}{namespace}/") if namespace else None
        if found:
            self.namespace = namespace
        elif self._answers_v2():
            self.namespace = ""
        elif found is None:
            raise self.not_an_etcd()
        else:
            raise CommandError(
                f"the etcd of {self.url} has no keys under {root}{namespace}/, where an"
                " EtcdV3Store has them, and its v2 API, which torch's EtcdStore uses,"
                " is off"
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
        except (OSError, UnicodeError) as error:
            reason = causes.describe(error, self.host)
            raise CommandError(f"{message} {reason}") from None
        # The parent process times out a server that does not answer.
        connection.settimeout(None)
        return connection

    def _count_keys(self, prefix: str) -> int | None:
        """Return the number of keys below a prefix; None without the v3 API."""
        # The character after a slash ends the range.
        ends = (prefix, prefix[:-1] + "0")
        start, end = (b64encode(each.encode()).decode() for each in ends)
        request = {"key": start, "range_end": end, "count_only": True}
        answer = self._request("POST", "/v3/kv/range", json.dumps(request))
        if "header" not in answer:
            return None
        try:
            return int(answer.get("count", 0))
        except (TypeError, ValueError):  # another server
            return None

    def _answers_v2(self) -> bool:
        return "action" in self._request("GET", "/v2/keys")

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request; an empty one if it is no JSON object."""
        # The parent process times out a server that does not answer.
        if self.secure:
            made: HTTPConnection = HTTPSConnection(
                self.host, self.port, context=self.access.context()
            )
        else:
            made = HTTPConnection(self.host, self.port)
        try:
            with closing(made) as connection:
                connection.request(method, path, body)
                answer = json.loads(connection.getresponse().read())
        except (OSError, HTTPException, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Let SIGINT end the process while torch is imported in the ``with`` block.

    torch's modules may catch a KeyboardInterrupt. Another SIGINT handler than
    Python's default is left as it is.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
