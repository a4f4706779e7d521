"""Target for the answers of an etcd, as EtcdV3Store and the rendezvous read them."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from fuzz.target import Inputs, Target, changed_bytes, changed_json
from support.hostile_json import JSON
from tracedstore.etcd import EtcdError, EtcdUnreachableError
from tracedstore.etcd.etcd_errors import RequestFailed, WatchEnded
from tracedstore.etcd.etcd_v3_store import next_puts
from tracedstore.etcd.gateway import Gateway, Message, text
from tracedstore.etcd.http_pool import ClusterMember, Connection
from tracedstore.etcd.namespace import Namespace, swap
from tracedstore.rendezvous.etcd_v3 import EtcdV3RendezvousBackend

_MEMBER = ClusterMember("h", 1, secure=False)
# A client gives up after some time, and the target after some requests.
_MAX_CALLS = 4


class _Socket:
    """The part of a socket that a connection reads with."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, seconds: float) -> None:
        """Do nothing."""

    def recv(self, size: int) -> bytes:
        """Return the next part."""
        part, self._data = self._data[:size], self._data[size:]
        return part

    def close(self) -> None:
        """Do nothing."""


class _Transport:
    """Gives one answer to each request."""

    def __init__(self, answer: Message) -> None:
        self._answer = answer
        self._calls = 0

    def call(self, *_args: Any, **_options: Any) -> Message:
        """Return the answer."""
        self._calls += 1
        if self._calls > _MAX_CALLS:
            raise EtcdUnreachableError("no answer")
        return self._answer


class _Watch:
    """Gives the messages of one stream to each watch."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def watch(self, _request: Mapping[str, Any], _deadline: float) -> "_Watch":
        """Return itself."""
        return self

    def __enter__(self) -> Any:
        return iter(self._messages)

    def __exit__(self, *_error: object) -> None:
        """Do nothing."""


def _connection(data: bytes) -> Connection:
    connection = Connection("h", 1, None)
    connection._socket = cast("Any", _Socket(data))
    return connection


def _gateway(data: bytes) -> Any:
    gateway: Any = Gateway([_MEMBER])
    # The version of a server that has no v3 API.
    gateway._pool.exchange = lambda *_: (200, data.partition(b"\r\n\r\n")[2])
    return gateway


def _answer(data: bytes) -> None:
    """Read an answer, and use it for each kind of request."""
    deadline = time.monotonic() + 30
    try:
        status, body = _connection(data).read_answer(deadline)
        answer = _gateway(data)._parsed(_MEMBER, status, body)
    except RequestFailed as failed:
        message = str(failed.failure.error)
    else:
        message = answer.get("token", "")
        _use(answer, deadline)
    # It becomes a line of a log, or a header.
    assert message.isprintable()


def _use(answer: Message, deadline: float) -> None:

    def namespace() -> Any:
        return Namespace("job", cast("Any", _Transport(answer)))

    keys = namespace().range("k")

    def backend() -> EtcdV3RendezvousBackend:
        return EtcdV3RendezvousBackend(cast("Any", _Transport(answer)), "job")

    uses = [
        lambda: namespace().read_all([keys, keys], deadline),
        lambda: namespace().missing([keys, keys], deadline),
        namespace().scan,
        lambda: namespace().delete(keys),
        lambda: namespace().queue_length(keys),
        lambda: namespace().pop(keys, deadline),
        lambda: namespace().count_up(keys),
        lambda: _swap(namespace(), deadline),
        backend().written_seconds_ago,
    ]
    for use in uses:
        # ValueError: the value of a key is no number.
        with suppress(EtcdError, ValueError):
            use()
    # torch's rendezvous handles these exceptions only.
    with suppress(RendezvousConnectionError):
        backend().get_state()
    for token in (None, 4):
        with suppress(RendezvousConnectionError):
            backend().set_state(b"state", token)


def _swap(namespace: Any, deadline: float) -> None:
    content = namespace.read(namespace.range("k"), deadline)
    content.data()
    swap(namespace.transport, content, b"new", deadline)


def _stream(data: bytes) -> None:
    """Read the messages of a watch, and wait for a key with them."""
    messages: list[Message] = []
    gateway, deadline = _gateway(data), time.monotonic() + 30
    try:
        messages.extend(gateway._messages(_connection(data), _MEMBER, deadline))
    finally:
        watch = cast("Any", _Watch(messages))
        next_puts(watch, (b"a", b"b"), 1, deadline)


_KEY = {
    "key": text(b"/tracedstore/job//k\0"),
    "value": text(b"7"),
    "create_revision": "3",
    "mod_revision": "4",
    "version": "1",
    "lease": "77",
}
_RANGE = {"header": {"revision": "5"}, "kvs": [_KEY], "count": "1", "more": False}
_TRANSACTION = {
    "header": {"revision": "5"},
    "succeeded": True,
    "responses": [{"response_range": _RANGE}, {"response_range": {"kvs": [_KEY]}}],
}
_LEASE = {"ID": "77", "TTL": "7200", "grantedTTL": "7200", "result": {"TTL": "7200"}}
_OTHERS = {"token": "abc.1", "deleted": "1", "etcdserver": "3.5.1"}
_ERROR = {"error": "etcdserver: no leader", "code": 14, "message": "no leader"}
_WATCH = {"result": {"created": True, "events": [{"type": "PUT", "kv": _KEY}]}}
_CANCELED = {"result": {"canceled": True, "cancel_reason": "compacted"}}


def _changed(*messages: dict[str, Any]) -> Inputs:
    wrong: list[Any] = [{}, [{}], "x", -1]
    fields = [dict.fromkeys(message, each) for message in messages for each in wrong]
    encoded = st.sampled_from(fields).map(lambda one: json.dumps(one).encode())
    return st.one_of(*(changed_json(message, JSON) for message in messages), encoded)


_BODIES = _changed(_RANGE, _TRANSACTION, _LEASE, _OTHERS, _ERROR)
# Cut off, because Hypothesis keeps its inputs: deeply nested ones are long.
_LINES = st.lists(_changed(_WATCH, _CANCELED, {"error": _ERROR}), max_size=4).map(
    lambda lines: b"\n".join(lines)[:65_536]
)
_STATUSES = st.sampled_from([b"200", b"200", b"200", b"404", b"400", b"503", b"x", b""])
_LENGTHS: Inputs = st.sampled_from([b"-1", b"9" * 5000, b"300000000", b"x", b"1"])


def _with_length(status: bytes, length: bytes | None, body: bytes) -> bytes:
    size = str(len(body)).encode() if length is None else length
    return b"HTTP/1.1 %s x\r\nContent-Length: %s\r\n\r\n%s" % (status, size, body)


def _in_chunks(status: bytes, size: int, body: bytes) -> bytes:
    # A long body in small chunks takes much time, and shows nothing more.
    size = max(size, len(body) // 500)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 %s x\r\nTransfer-Encoding: chunked\r\n\r\n" % status
    return head + chunks + b"0\r\n\r\n"


def _responses(bodies: Inputs) -> Inputs:
    return changed_bytes(
        st.builds(_with_length, _STATUSES, st.none() | _LENGTHS, bodies)
        | st.builds(_in_chunks, _STATUSES, st.sampled_from([1, 7, 4096]), bodies)
    )


TARGETS = (
    Target(
        name="etcd_answer",
        run=_answer,
        inputs=_responses(_BODIES),
        # The connection broke, or the server does not speak HTTP.
        allowed=(OSError,),
        share=0.5,
    ),
    Target(
        name="etcd_watch",
        run=_stream,
        inputs=_responses(_LINES),
        # The watch ended: the caller reads again.
        allowed=(OSError, RequestFailed, WatchEnded),
        share=0.5,
    ),
)
