"""A client of etcd's JSON API: its messages, and requests with failover and log-in.

In the JSON of etcd, bytes are base64, 64-bit numbers are text, and false, 0 and empty
fields are left out. A server may send anything, so each answer is checked before it is
read.
"""

import json
import random
import re
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.etcd_errors import (
    EtcdDeniedError,
    EtcdError,
    EtcdOutcomeUnknownError,
    Failure,
    RequestFailed,
    WatchEnded,
    answer_failure,
    proxy_failure,
)
from tracedstore.etcd.http_pool import ClusterMember, Connection, Pool
from tracedstore.etcd.request_counts import Traffic
from tracedstore.recording.cold_metrics import RequestResult
from tracedstore.recording.recorder import RECORDER

Message = dict[str, Any]
Range = tuple[bytes, bytes]

# etcd accepts this many operations in a transaction (--max-txn-ops).
MAX_OPERATIONS = 128
# Values in one answer. A short value takes up to fifty times its bytes as a Python
# object, so a bound on the bytes alone does not bound the memory.
_MAX_VALUES = 4_000_000
INT64 = 2**63
_MAX_TOKEN = 16_384
# Seconds for one attempt. etcd itself gives up after seven.
_ATTEMPT_SECONDS = 10.0
# A read moves on to the next member sooner.
_READ_ATTEMPT_SECONDS = 2.5
_VERSION_SECONDS = 2.0
# Seconds of pause after all members failed: doubled each time, up to a maximum.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_OK = 200
_OK_RESULT: RequestResult = "ok"
_FAILED: RequestResult = "failed"
_UNKNOWN: RequestResult = "unknown"
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_NOT_FOUND = 404
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})[\w.+-]{0,40}", re.ASCII)
_AUTHENTICATE = "auth/authenticate"
# The start of an error that is no JSON.
_COMMON_NAME = b"CommonName of client"


def text(data: bytes) -> str:
    """Return bytes as JSON has them."""
    return b64encode(data).decode("ascii")


def range_of(keys: Range | bytes, **options: Any) -> Message:
    """Return the message that reads a range, or one key."""
    if isinstance(keys, bytes):
        return {"key": text(keys), **options}
    return {"key": text(keys[0]), "range_end": text(keys[1]), **options}


def read(keys: Range | bytes, **options: Any) -> Message:
    """Return the operation of a transaction that reads."""
    return {"request_range": range_of(keys, **options)}


def put(key: bytes, value: bytes) -> Message:
    """Return the operation of a transaction that writes a key."""
    return {"request_put": {"key": text(key), "value": text(value)}}


def delete(keys: Range | bytes) -> Message:
    """Return the operation of a transaction that deletes."""
    return {"request_delete_range": range_of(keys)}


def compare(keys: Range | bytes, target: str, result: str, number: int) -> Message:
    """Return a condition on the revision or version of a key, or of all in a range.

    Args:
        keys: The key or range; a key that does not exist has the number 0.
        target: ``MOD``, ``CREATE`` or ``VERSION``.
        result: ``EQUAL`` or ``LESS``.
        number: What it is compared with.
    """
    fields = {
        "MOD": "mod_revision",
        "CREATE": "create_revision",
        "VERSION": "version",
    }
    return range_of(keys, target=target, result=result, **{fields[target]: str(number)})


def _parse(data: bytes) -> Message:
    """Parse an answer.

    Raises:
        ValueError: It is no JSON object, or one that no etcd sends.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ValueError("too many values")
    try:
        answer = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _object(answer)


def _check_fields(answer: Message) -> None:
    """Check the types of all fields that this package reads.

    Raises:
        ValueError: One has another type.
    """
    try:
        _check(answer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _check(answer: Any) -> None:
    for name, value in _object(answer).items():
        if checked := _FIELDS.get(name):
            checked(value)


def _object(value: Any) -> Message:
    if type(value) is not dict:
        raise ValueError("not an object")
    return value


def _objects(value: Any) -> None:
    if type(value) is not list:
        raise ValueError("not a list")
    for each in value:
        _check(each)


def _bytes(value: Any) -> None:
    if type(value) is not str:
        raise ValueError("not base64")
    b64decode(value, validate=True)


def _number(value: Any) -> None:
    if not isinstance(value, str | int) or not -INT64 <= int(value) < INT64:
        raise ValueError("not a number of 64 bits")


def _flag(value: Any) -> None:
    if type(value) is not bool:
        raise ValueError("neither true nor false")


def _token(value: Any) -> None:
    # It becomes a header of later requests.
    text = value if isinstance(value, str) else "\n"
    if len(text) > _MAX_TOKEN or not (text.isascii() and text.isprintable()):
        raise ValueError("not a token")


_FIELDS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("header", "kv", "response_range", "result"), _check),
    **dict.fromkeys(("kvs", "events", "responses"), _objects),
    **dict.fromkeys(("key", "value"), _bytes),
    **dict.fromkeys(("revision", "create_revision", "mod_revision"), _number),
    **dict.fromkeys(("version", "count", "deleted", "lease"), _number),
    **dict.fromkeys(("ID", "TTL", "grantedTTL"), _number),
    **dict.fromkeys(("succeeded", "more", "canceled"), _flag),
    "token": _token,
}


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key in etcd."""

    key: bytes
    value: bytes
    created: int
    modified: int
    version: int


def key_values(answer: Message) -> list[KeyValue]:
    """Return the keys of a range."""
    return [_key_value(found) for found in answer.get("kvs", ())]


def events(answer: Message) -> list[tuple[bool, KeyValue]]:
    """Return the changes in a message of a watch: whether it is a put, and the key."""
    return [
        (event.get("type", "PUT") == "PUT", _key_value(event.get("kv", {})))
        for event in answer.get("events", ())
    ]


def responses(answer: Message, expected: int) -> list[Message]:
    """Return the answers to the reads of a transaction, in order.

    Raises:
        EtcdError: It has another number of them.
    """
    kind = "response_range"
    found = [each[kind] for each in answer.get("responses", ()) if kind in each]
    if len(found) != expected:
        raise EtcdError("etcd does not answer all reads of a transaction")
    return found


def revision(answer: Message) -> int:
    """Return the revision of the store at an answer."""
    return int(answer.get("header", {}).get("revision", 0))


def count(answer: Message) -> int:
    """Return the number of keys in a range."""
    return int(answer.get("count", 0))


def _key_value(found: Message) -> KeyValue:
    return KeyValue(
        b64decode(found.get("key", "")),
        b64decode(found.get("value", "")),
        int(found.get("create_revision", 0)),
        int(found.get("mod_revision", 0)),
        int(found.get("version", 0)),
    )


class Gateway:
    """A client of one etcd cluster. Threads may share it."""

    def __init__(
        self,
        members: Sequence[ClusterMember],
        *,
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self.traffic = Traffic()
        self._members = tuple(members)
        # The member in use. It starts at a random one and stays until that fails.
        self._index = random.SystemRandom().randrange(len(self._members))
        self._pool = Pool(context)
        self._user, self._password = user, password
        # A token is no connection: a forked child may go on with that of its parent.
        self._token = ""
        self._without_users = False

    def call(
        self,
        method: str,
        request: Mapping[str, Any],
        deadline: float,
        *,
        repeatable: bool,
    ) -> Message:
        """Make one request, and repeat it where that is safe.

        Args:
            method: The method, for example ``kv/range``.
            request: The message.
            deadline: When to give up, by ``time.monotonic()``.
            repeatable: A second application of the request does no harm.

        Raises:
            EtcdOutcomeUnknownError: The answer was lost, and it is not repeatable.
            EtcdError: Any other failure.
        """
        body = json.dumps(request, separators=(",", ":")).encode()
        renewed, tries = False, 0
        while True:
            member, token = self._current, ""
            try:
                limit = self._attempt_deadline(deadline, repeatable=repeatable)
                token = self._log_in(member, limit)
                return self._attempt(member, method, body, limit, token)
            except RequestFailed as failed:
                failure = failed.failure
            if failure.expired and self._user and not renewed:
                self._forget(token)
                self.traffic.add_recovery("log_in")
                renewed = True
                continue
            if failure.sent and not repeatable:
                if failure.transient:
                    # The next request goes to another member.
                    self._leave(member)
                raise EtcdOutcomeUnknownError(
                    "it is unknown whether etcd applied a write, and the write is not"
                    f" repeated: {failure.error}"
                ) from failure.cause
            tries += 1
            self._pause(failure, member, tries, deadline)

    @contextmanager
    def watch(
        self, request: Mapping[str, Any], deadline: float
    ) -> Iterator[Iterator[Message]]:
        """Open a watch; iterate over its messages.

        Raises:
            TimeoutError: The deadline has passed.
            WatchEnded: The connection or the leader was lost.
            EtcdError: Any other failure.
        """
        member, started, token = self._current, RECORDER.ticks(), ""
        body = json.dumps({"create_request": request}).encode()
        result, received = _FAILED, 0
        try:
            limit = self._attempt_deadline(deadline, repeatable=True)
            token = self._log_in(member, limit)
            with self._pool.open(member, limit) as connection:
                connection.write("POST", "/v3/watch", body, _headers(token), limit)
                try:
                    yield self._messages(connection, member, deadline)
                finally:
                    received = connection.received
            result = _OK_RESULT
        except RequestFailed as failed:
            self._raise_ended(failed.failure, member, token, deadline)
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._pool.check_open()
            if time.monotonic() >= deadline:
                result = _OK_RESULT
                raise TimeoutError from None
            failure = self._pool.broken(member, error, sent=False)
            self._raise_ended(failure, member, token, deadline)
        finally:
            self.traffic.add_request(
                "watch",
                str(member),
                result,
                started,
                sent=len(body),
                received=received,
            )

    def clone(self) -> "Gateway":
        """Return another client of the cluster, with connections of its own."""
        other = Gateway(
            self._members,
            context=self._pool.context,
            user=self._user,
            password=self._password,
        )
        other._pool.reached = self._pool.reached
        other._token, other._without_users = self._token, self._without_users
        return other

    def close(self) -> None:
        """End the blocked calls of all threads, and close the connections."""
        self._pool.close()

    @property
    def _current(self) -> ClusterMember:
        return self._members[self._index % len(self._members)]

    def _attempt_deadline(self, deadline: float, *, repeatable: bool) -> float:
        moves_on = repeatable and len(self._members) > 1
        seconds = _READ_ATTEMPT_SECONDS if moves_on else _ATTEMPT_SECONDS
        return min(deadline, time.monotonic() + seconds)

    def _pause(
        self, failure: Failure, member: ClusterMember, tries: int, deadline: float
    ) -> None:
        """Prepare the next attempt, or raise the failure's error."""
        members = len(self._members)
        if not failure.transient or (tries >= members and not self._pool.reached):
            raise failure.error from failure.cause
        self._leave(member)
        self.traffic.add_recovery("retry")
        if tries % members:
            return
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries // members - 1))
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads the clients
        left = deadline - time.monotonic()
        if left > 0:
            self._pool.pause(min(pause, left))
        if left <= pause:
            raise failure.error from failure.cause

    def _leave(self, member: ClusterMember) -> None:
        """Move on from a member that failed, if there is another one."""
        if len(self._members) > 1:
            # Another thread may have moved on already.
            if self._current is member:
                self._index += 1
            self.traffic.add_recovery("failover")

    def _raise_ended(
        self, failure: Failure, member: ClusterMember, token: str, deadline: float
    ) -> NoReturn:
        """Raise `WatchEnded`, or the failure's error if it is definite."""
        if failure.expired and self._user:
            self._forget(token)
        elif failure.transient and self._pool.reached:
            self._leave(member)
            # The caller reads next, and that pauses if it fails as well.
            self._pool.pause(max(0.0, min(_FIRST_PAUSE, deadline - time.monotonic())))
        else:
            raise failure.error from failure.cause
        raise WatchEnded(str(failure.error))

    def _attempt(
        self,
        member: ClusterMember,
        method: str,
        body: bytes,
        deadline: float,
        token: str,
    ) -> Message:
        started, result, answer = RECORDER.ticks(), _FAILED, b""
        try:
            status, answer = self._pool.exchange(
                member, "POST", f"/v3/{method}", body, _headers(token), deadline
            )
            message = self._parsed(member, status, answer)
            result = _OK_RESULT
        except RequestFailed as failed:
            result = _UNKNOWN if failed.failure.sent else _FAILED
            raise
        finally:
            self.traffic.add_request(
                method,
                str(member),
                result,
                started,
                sent=len(body),
                received=len(answer),
            )
        return message

    def _parsed(self, member: ClusterMember, status: int, answer: bytes) -> Message:
        """Return the message in an answer."""
        try:
            message = _parse(answer)
            if status == _OK:
                _check_fields(message)
        except ValueError:
            raise RequestFailed(self._not_the_api(member, status, answer)) from None
        self._pool.reached = True
        if status == _OK:
            return message
        raise RequestFailed(answer_failure(str(member), message, status))

    def _log_in(self, member: ClusterMember, deadline: float) -> str:
        """Return the token, which is requested if there is none.

        Threads that find none at the same time all log in: a lock would block them for
        as long as etcd does not answer.
        """
        if not self._user or self._token or self._without_users:
            return self._token
        request = {"name": self._user, "password": self._password}
        # Without the old token: etcd 3.4 rejects the request because of it.
        try:
            answer = self._attempt(
                member, _AUTHENTICATE, json.dumps(request).encode(), deadline, ""
            )
        except RequestFailed as failed:
            if "not enabled" in str(failed):
                self._without_users = True
                return ""
            # A log-in writes nothing: it can be repeated.
            raise RequestFailed(replace(failed.failure, sent=False)) from failed
        self._token = str(answer.get("token", ""))
        return self._token

    def _forget(self, token: str) -> None:
        """Log in again before the next request, unless another thread has done so."""
        self._without_users = False
        if self._token == token:
            self._token = ""

    def _messages(
        self, connection: Connection, member: ClusterMember, deadline: float
    ) -> Iterator[Message]:
        status, lines = connection.read_stream(deadline)
        for line in lines:
            message = self._parsed(member, status, line)
            if "error" in message:
                raise RequestFailed(answer_failure(str(member), message, status))
            yield message.get("result", {})
        raise ConnectionResetError("the watch ended")

    def _not_the_api(
        self, member: ClusterMember, status: int, answer: bytes
    ) -> Failure:
        """Return the failure for an answer that no v3 API gives."""
        if answer.startswith(_COMMON_NAME):
            return Failure(
                error=EtcdDeniedError(
                    f"etcd at {member} has users, and then accepts no client"
                    " certificate with a common name over its JSON API: use one"
                    " without a common name"
                )
            )
        where = f"the server at {member}"
        if status == _NOT_FOUND:
            text = f"{where} has no JSON API of etcd v3{self._version(member)}"
        else:
            text = f"{where} does not answer as etcd does (HTTP status {status})"
        if status == _OK:
            return Failure(error=EtcdError(text), sent=True)
        return proxy_failure(EtcdError(text), status)

    def _version(self, member: ClusterMember) -> str:
        """Return why a server has no v3 API, as far as its version shows."""
        limit = time.monotonic() + _VERSION_SECONDS
        try:
            _, answer = self._pool.exchange(member, "GET", "/version", b"", {}, limit)
            found = _VERSION.fullmatch(str(_parse(answer).get("etcdserver")))
        except (RequestFailed, ValueError):
            found = None
        if found is None:
            return ": it is another server"
        if (int(found[1]), int(found[2])) >= (3, 4):
            return (
                f": this etcd {found[0]} was started with --enable-grpc-gateway=false,"
                " which switches it off"
            )
        return f": this is etcd {found[0]}, and 3.4 is the first version that has it"


def _headers(token: str) -> dict[str, str]:
    # Without a leader a request would hang, and a watch would stay silent.
    headers = {"Grpc-Metadata-hasleader": "true"}
    # etcd can trace its requests from 3.5 on; the JSON API passes on such headers.
    context: dict[str, str] = {}
    _TRACE_CONTEXT.inject(context)
    for name, value in context.items():
        headers[f"Grpc-Metadata-{name}"] = value
    if token:
        headers["Authorization"] = token
    return headers
