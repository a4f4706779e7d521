"""What a rank answers when the page asks what it is doing, and the thread that does.

torch's own worker server takes handlers in Python too, and is not used for this: it
counts references to them without the GIL (measured on 2.13: four clients crash the
process within seconds), its shutdown waits for them with the GIL held, and one that
is asked while the interpreter ends aborts the process. A thread of Python's has none
of that.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from tracedstore.coordination.ranges import by_host, fold, unfold
from tracedstore.core.barriers import Stalled
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.recorder import RECORDER
from tracedstore.export.setup import in_flight
from tracedstore.signals import names
from tracedstore.signals.inflight import InFlight

# A thread has one call in flight; a process with more threads than this in calls is
# described well enough by the oldest of them.
_MOST_CALLS = 64
# Seconds that somebody who connects has to say what he wants.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank is doing.

    Attributes:
        process: Who says this: rank, host, pid, run id, as far as known.
        recording: Whether calls are recorded there at all.
        calls: The Store calls that have not returned, oldest first.
        more_calls: How many more there are.
        barriers: The barriers that it waits at and found ranks missing from.
    """

    process: Mapping[str, Any]
    recording: bool
    calls: tuple[InFlight, ...]
    more_calls: int
    barriers: tuple[Stalled, ...]

    @classmethod
    def now(cls) -> "Answer":
        """Tell what this process is doing."""
        calls = in_flight()
        return cls(
            process=ProcessIdentity.from_environment(os.environ).fields(),
            recording=RECORDER.on,
            calls=tuple(calls[:_MOST_CALLS]),
            more_calls=max(0, len(calls) - _MOST_CALLS),
            barriers=tuple(RECORDER.barriers.now_stalled()),
        )

    def to_bytes(self) -> bytes:
        """Write it as JSON; the missing ranks folded, because they may be many."""
        return json.dumps(
            {
                "process": dict(self.process),
                "recording": self.recording,
                "calls": [asdict(call) for call in self.calls],
                "more_calls": self.more_calls,
                "barriers": [
                    {
                        "family": stalled.family,
                        "arrived": stalled.arrived,
                        "missing": {
                            host: fold(ranks)
                            for host, ranks in by_host(
                                stalled.missing, stalled.missing.__getitem__
                            ).items()
                        },
                        "possible": stalled.possible,
                    }
                    for stalled in self.barriers
                ],
            }
        ).encode()

    @classmethod
    def from_bytes(cls, written: bytes) -> "Answer":
        """Read it; anything else is a ValueError."""
        try:
            found = json.loads(written)
            return cls(
                process=dict(found["process"]),
                recording=bool(found["recording"]),
                calls=tuple(map(_call, found["calls"])),
                more_calls=int(found["more_calls"]),
                barriers=tuple(map(_stalled, found["barriers"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the answer of a rank") from error


def _call(found: Mapping[str, Any]) -> InFlight:
    # The types of its fields are str, int and float, which also convert.
    kinds: dict[str, Any] = {field.name: field.type for field in fields(InFlight)}
    return InFlight(**{name: kind(found[name]) for name, kind in kinds.items()})


def _stalled(found: Mapping[str, Any]) -> Stalled:
    return Stalled(
        family=str(found["family"]),
        arrived=int(found["arrived"]),
        missing={
            rank: str(host)
            for host, ranks in found["missing"].items()
            for rank in unfold(ranks)
        },
        possible=int(found["possible"]),
    )


class _Question(BaseHTTPRequestHandler):
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Answer; whatever the path, there is one thing to ask."""
        try:
            status, body = HTTPStatus.OK, Answer.now().to_bytes()
        except Exception as error:
            RECORDER.failures.add(names.DEBUG_PAGE, error)
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Keep quiet: standard error is the job's."""


class Answering(ThreadingHTTPServer):
    """Answers in threads that do not keep the process alive.

    Attributes:
        address: Where, as host:port. By name, as torch's worker server has it.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self) -> None:
        try:
            # Takes IPv4 as well; torch's worker server binds the same.
            self.address_family = socket.AF_INET6
            super().__init__(("::", 0), _Question)
        except OSError:
            self.address_family = socket.AF_INET
            super().__init__(("0.0.0.0", 0), _Question)  # noqa: S104 - asked from afar
        self.address = f"{socket.gethostname()}:{self.server_port}"
        # A child has the socket and not the thread: it would take questions and
        # never answer them, also when this process is long gone.
        os.register_at_fork(after_in_child=self.socket.close)

    def server_bind(self) -> None:
        """Bind, without asking a name server what this host is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(
            target=self.serve_forever, name="tracedstore-debug-page", daemon=True
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Leave standard error to the job; who hung up is no failure of ours."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            RECORDER.failures.add(names.DEBUG_PAGE, error)
