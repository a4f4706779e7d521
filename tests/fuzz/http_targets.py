"""Targets for HTTP: requests to the endpoint, and responses of other ranks."""

import asyncio
import io
import json
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from hypothesis import strategies as st

from fuzz.target import RANGES, Inputs, Target, changed_bytes, changed_json
from support.hostile_json import ENTRY, JSON, PROCESS_STATUS
from tracedstore.coordination.rank_registry import parse_entry
from tracedstore.export import http_endpoint as endpoint
from tracedstore.export import http_server as server
from tracedstore.export.settings import Settings
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach import rank_endpoints
from tracedstore.tools.attach.job_reading import JobReading
from tracedstore.tools.attach.job_state import JobState
from tracedstore.tools.attach.job_text import status_lines
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.token_policy import TokenPolicy

_SECRET = b"content behind a token"
_TOKEN = "c2VjcmV0IHRva2Vu"
_SERVER = cast(
    "Any",
    SimpleNamespace(
        pages={
            "/metrics": lambda _accept: server.Response(_SECRET),
            "/healthz": lambda _accept: server.Response(b"ok\n"),
        },
        access=server.Access(
            credentials=endpoint._credentials(Settings(http_token=_TOKEN)),
            open_pages=frozenset({"/healthz"}),
            hosts=frozenset({"job.example"}),
        ),
    ),
)


class _Connection:
    """The part of a socket that a request handler uses."""

    def __init__(self, received: bytes) -> None:
        self._received = received
        self.sent = b""

    def makefile(self, *_args: object) -> io.BytesIO:
        """Return what the client has sent."""
        return io.BytesIO(self._received)

    def sendall(self, data: bytes) -> None:
        """Keep the response."""
        self.sent += data


def _request(data: bytes) -> None:
    connection = _Connection(data)
    server._Request(cast("Any", connection), ("127.0.0.1", 1), _SERVER)
    assert _SECRET not in connection.sent or _TOKEN.encode() in data


def _host_header(data: bytes) -> None:
    header = data.decode("latin-1")
    _SERVER.access.accepts_host(header)
    for origin in (header, f"http://{header}"):
        if _SERVER.access.accepts_origin(origin, "127.0.0.1:1"):
            assert origin.lower() in ("http://127.0.0.1:1", "https://127.0.0.1:1")


def _process_status(data: bytes) -> None:
    status = ProcessFacts.from_page(data)
    assert all(abs(call.waited_seconds) < float("inf") for call in status.in_flight)


_INFO = parse_entry(json.dumps(ENTRY).encode())
_JOB = JobState(
    groups=(),
    in_progress=(),
    unread_in_progress=0,
    abandoned=(),
    finished=(),
    unread_finished=0,
    rendezvous={},
    worker_stores={},
)
_loop = asyncio.new_event_loop()


class _Writer:
    """The part of a StreamWriter that the client uses."""

    def write(self, data: bytes) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Close nothing."""


def _response(data: bytes) -> None:
    """Read the response of a rank, and show it in the status."""
    assert _INFO is not None

    async def respond(*_args: object, **_kwargs: object) -> tuple[Any, _Writer]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return reader, _Writer()

    with mock.patch.object(asyncio, "open_connection", respond):
        page = _loop.run_until_complete(
            rank_endpoints._page_or_reason(
                "http://h:1/metrics", "/inflight", TokenPolicy(), None, 30.0
            )
        )
    reply = rank_endpoints._reply(_INFO, page)
    status = JobReading(store="tcp://h:1", now=1.0, job=_JOB, replies={_INFO: reply})
    for line in status_lines(view_of(status)):
        str(line)
    json.dumps(status.to_json()).encode()


_HOSTS = ["localhost", "job.example:80", "[::1]:9", "evil.example", "[::1", "a" * 300]
_HEADERS: Inputs = st.sampled_from(
    [
        *(f"Host: {host}".encode() for host in _HOSTS),
        b"Authorization: Bearer wrong",
        b"Authorization: Basic \xff\xfe",
        b"Authorization: Basic dXNlcjp3cm9uZw==",
        b"Accept: application/openmetrics-text; version=1.0.0",
        b"Content-Length: 99999999999",
        b"Expect: 100-continue",
        b" folded",
        b"no colon",
        b"X: " + b"x" * 20_000,
    ]
)
_REQUEST_LINES: Inputs = st.sampled_from(
    [
        b"GET /metrics HTTP/1.1",
        b"GET /healthz HTTP/1.0",
        b"HEAD /metrics?x=1 HTTP/1.1",
        b"GET //evil.example/ HTTP/1.1",
        b"POST / HTTP/1.1",
        b"GET /metrics",
        b"GET / HTTP/9" + b"9" * 5000,
        b"\x16\x03\x01",
        b"",
    ]
)
_REQUESTS: Inputs = st.tuples(_REQUEST_LINES, st.lists(_HEADERS, max_size=5)).map(
    lambda parts: b"\r\n".join([parts[0], *parts[1], b"", b""])
)
_BARRIER: dict[str, Any] = {
    "barrier": "b",
    "arrived_count": 1,
    "possibly_missing_count": 0,
}
_STATUS: dict[str, Any] = PROCESS_STATUS | {
    "process": {name: ENTRY[name] for name in ("rank", "host", "pid")}
}
_STALLED = st.lists(
    st.dictionaries(
        st.text(max_size=3),
        RANGES,
        max_size=30,
    ).map(lambda missing: {**_BARRIER, "missing": missing}),
    max_size=8,
)
_STATUSES: Inputs = changed_json(_STATUS, JSON) | _STALLED.map(
    lambda barriers: json.dumps({**_STATUS, "barriers": barriers}).encode()
)
_STATUS_LINES: Inputs = st.sampled_from(
    [b"HTTP/1.0 200 OK", b"HTTP/1.0 401 \xff", b"HTTP/1.1 302 x", b"x", b""]
)
_LENGTHS: Inputs = st.sampled_from(
    [b"-1", b"9" * 5000, b"5000000", b"x", b"\xb2", b"1"]
)


def _respond(status: bytes, length: bytes | None, body: bytes) -> bytes:
    size = str(len(body)).encode() if length is None else length
    return b"%s\r\nContent-Length: %s\r\n\r\n%s" % (status, size, body)


TARGETS = (
    Target(
        name="http_request",
        run=_request,
        inputs=changed_bytes(_REQUESTS),
        # The request is too long: the connection is closed without a response.
        allowed=(ConnectionAbortedError,),
    ),
    Target(
        name="host_header",
        run=_host_header,
        inputs=changed_bytes(st.sampled_from([host.encode() for host in _HOSTS])),
    ),
    Target(
        name="process_status",
        run=_process_status,
        inputs=_STATUSES,
        allowed=(ValueError,),
    ),
    Target(
        name="inflight_response",
        run=_response,
        inputs=changed_bytes(
            st.builds(_respond, _STATUS_LINES, st.none() | _LENGTHS, _STATUSES)
        ),
        share=0.5,
    ),
)
