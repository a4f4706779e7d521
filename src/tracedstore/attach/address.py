"""Find the store of a running job by its address, and look at it.

Nothing here needs torch until somebody is there: whoever mistyped an address is told
so at once.
"""

import json
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult, urlsplit

from tracedstore.attach.child_process import ChildTimeoutError, Mark, run_in_child
from tracedstore.attach.tcpstore_probe import greet, is_known
from tracedstore.attach.torch_import import loading
from tracedstore.core.errors import CommandError

if TYPE_CHECKING:
    from tracedstore.attach.snapshot import StoreSnapshot

T = TypeVar("T")

# Seconds in which something is said, whatever is there; with the start of Python and
# the last word, less than five on a busy machine too.
_WITHIN = 4.0
# Seconds to get a first answer, where loading torch has used them up; and each next
# one, of which a large job needs many.
_ANSWER_WITHIN = 2.0
_READ_WITHIN = 3.0
# Seconds to get a connection.
_CONNECT_WITHIN = 2.5
ACCEPTED = "tcp://HOST:PORT, file:///PATH or etcd://HOST:PORT/PREFIX"
_SAYS = {
    "tcp": "it hangs, or what listens there is something else",
    "file": "it is no FileStore, its disk hangs, or somebody who hangs has locked it",
    "etcd": "it hangs, or what listens there is something else",
}

_loaded = time.monotonic()


class Address:
    """Where the store of a job is.

    Attributes:
        url: As it was given.
        path: The file, or the prefix in etcd.
    """

    def __init__(self, url: str) -> None:
        """Check the address; `CommandError` where it is none."""
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
        # The first look began when the command did.
        self._began: float | None = _loaded

    def probe(self) -> None:
        """Say what is wrong as far as that can be told without torch.

        Raises:
            CommandError: There is nothing, or something else.
        """
        self._apart(_WITHIN, lambda _: self.reach())

    def look(self, wanted: Callable[[Sequence[str]], list[str]]) -> "StoreSnapshot":
        """Read the store as one more client, in bounded time and without a trace.

        Args:
            wanted: Chooses the keys whose values are read.

        Raises:
            CommandError: There is none, or something else is there, or it does not
                answer.
        """
        # Before the child is made, so that the next one has it too.
        with loading():
            from tracedstore.attach.snapshot import StoreSnapshot  # noqa: PLC0415
            from tracedstore.attach.store_connection import attached  # noqa: PLC0415

        now = time.monotonic()
        began, self._began = self._began or now, None
        left = began + _WITHIN - now

        def looking(answered: Mark) -> StoreSnapshot:
            with attached(self) as store:
                answered()
                return StoreSnapshot.of(store, wanted, answered)

        return self._apart(max(left, _ANSWER_WITHIN), looking, _READ_WITHIN)

    def _apart(self, within: float, work: Callable[[Mark], T], then: float = 0.0) -> T:
        what = f"the store at {self.url}"
        try:
            return run_in_child(within, work, then)
        except ChildTimeoutError as late:
            if late.marked:
                raise CommandError(
                    f"{what} answered, and then not for {then:g} s: it is overloaded,"
                    " or hangs by now"
                ) from None
            raise CommandError(
                f"{what} does not answer within {within:.1f} s: {_SAYS[self.scheme]}"
            ) from None
        except ChildProcessError as error:
            raise CommandError(
                f"{what} cannot be read: the process that did was {error}"
            ) from None

    def reach(self) -> None:
        """Find out whether somebody is there; what torch says is many lines.

        Raises:
            CommandError: Nobody is, or something else.
        """
        if self.scheme == "file":
            self._open()
            return
        with self._connected() as connection:
            if self.scheme == "tcp" and is_known() and not greet(connection):
                raise self.no_tcp_store()
        if self.scheme == "etcd":
            self._speak_http()

    def unreadable(self, why: str | None) -> CommandError:
        """Say why a file cannot be read."""
        return CommandError(
            f"the store at {self.url} cannot be read: {self.path}: {why}"
        )

    def _open(self) -> None:
        try:
            kind = stat.S_IFMT(Path(self.path).stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise self.unreadable("Not a regular file")
            Path(self.path).open("rb").close()
        except OSError as error:
            raise self.unreadable(error.strerror) from None

    def no_tcp_store(self) -> CommandError:
        """Say that it is something else."""
        return CommandError(
            f"what listens at {self.url} does not answer as a TCPStore does: it is"
            " something else, or of a torch too old to be asked"
        )

    def no_etcd(self) -> CommandError:
        """Say that it is something else."""
        return CommandError(
            f"what listens at {self.url} does not answer as an etcd with the v2 API"
            " does"
        )

    def _connected(self) -> socket.socket:
        here = (self.host, self.port)
        cannot = f"the store at {self.url} cannot be reached:"
        try:
            connection = socket.create_connection(here, timeout=_CONNECT_WITHIN)
        except socket.gaierror:
            raise CommandError(
                f"{cannot} the name {self.host!r} is not known here"
            ) from None
        except ConnectionRefusedError:
            raise CommandError(
                f"{cannot} nothing listens there; is the job still running?"
            ) from None
        except (OSError, UnicodeError) as error:
            raise CommandError(
                f"{cannot} {getattr(error, 'strerror', None) or error}"
            ) from None
        # As above.
        connection.settimeout(None)
        return connection

    def _speak_http(self) -> None:
        # Whoever does not answer is noticed from outside.
        where = HTTPConnection(self.host, self.port)
        try:
            with closing(where) as connection:
                connection.request("GET", "/v2/keys")
                json.loads(connection.getresponse().read())["action"]
        except (OSError, HTTPException, ValueError, TypeError, KeyError):
            raise self.no_etcd() from None
