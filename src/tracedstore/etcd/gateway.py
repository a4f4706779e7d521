"""Sends requests to etcd's JSON API over HTTP, with failover, log-in and retries."""

import json
import random
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd import messages
from tracedstore.etcd.endpoints import Endpoint, Rotation
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
from tracedstore.etcd.http_pool import Connection, Pool
from tracedstore.etcd.messages import Message
from tracedstore.etcd.request_counts import Traffic
from tracedstore.recording.cold_metrics import RequestResult
from tracedstore.recording.recorder import RECORDER

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


class Gateway:
    """A client of one etcd cluster. Threads may share it."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self.traffic = Traffic()
        self._rotation = Rotation(endpoints)
        self._pool = Pool(context)
        self._user, self._password = user, password
        # A forked child shares the token of its parent, and so does a clone.
        self._token = ""
        self._without_users = False

    @property
    def host(self) -> str:
        """The host of the first endpoint."""
        return self._rotation.endpoints[0].host

    @property
    def port(self) -> int:
        """The port of the first endpoint."""
        return self._rotation.endpoints[0].port

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
            endpoint, token = self._rotation.current, ""
            try:
                limit = self._attempt_deadline(deadline, repeatable=repeatable)
                token = self._log_in(endpoint, limit)
                return self._attempt(endpoint, method, body, limit, token)
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
                    self._leave(endpoint)
                raise EtcdOutcomeUnknownError(
                    "it is unknown whether etcd applied a write, and the write is not"
                    f" repeated: {failure.error}"
                ) from failure.cause
            tries += 1
            self._pause(failure, endpoint, tries, deadline)

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
        endpoint, started, token = self._rotation.current, RECORDER.ticks(), ""
        body = json.dumps({"create_request": request}).encode()
        result, received = _FAILED, 0
        try:
            limit = self._attempt_deadline(deadline, repeatable=True)
            token = self._log_in(endpoint, limit)
            with self._pool.open(endpoint, limit) as connection:
                connection.write("POST", "/v3/watch", body, _headers(token), limit)
                try:
                    yield self._messages(connection, endpoint, deadline)
                finally:
                    received = connection.received
            result = _OK_RESULT
        except RequestFailed as failed:
            self._raise_ended(failed.failure, endpoint, token, deadline)
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._pool.check_open()
            if time.monotonic() >= deadline:
                result = _OK_RESULT
                raise TimeoutError from None
            failure = self._pool.broken(endpoint, error, sent=False)
            self._raise_ended(failure, endpoint, token, deadline)
        finally:
            self.traffic.add_request(
                "watch",
                str(endpoint),
                result,
                started,
                sent=len(body),
                received=received,
            )

    def clone(self) -> "Gateway":
        """Return another client of the cluster, with connections of its own."""
        other = Gateway(
            self._rotation.endpoints,
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

    def _attempt_deadline(self, deadline: float, *, repeatable: bool) -> float:
        moves_on = repeatable and len(self._rotation.endpoints) > 1
        seconds = _READ_ATTEMPT_SECONDS if moves_on else _ATTEMPT_SECONDS
        return min(deadline, time.monotonic() + seconds)

    def _pause(
        self, failure: Failure, endpoint: Endpoint, tries: int, deadline: float
    ) -> None:
        """Prepare the next attempt, or raise the failure's error."""
        members = len(self._rotation.endpoints)
        if not failure.transient or (tries >= members and not self._pool.reached):
            raise failure.error from failure.cause
        self._leave(endpoint)
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

    def _leave(self, endpoint: Endpoint) -> None:
        if self._rotation.leave(endpoint):
            self.traffic.add_recovery("failover")

    def _raise_ended(
        self, failure: Failure, endpoint: Endpoint, token: str, deadline: float
    ) -> NoReturn:
        """Raise `WatchEnded`, or the failure's error if it is definite."""
        if failure.expired and self._user:
            self._forget(token)
        elif failure.transient and self._pool.reached:
            self._leave(endpoint)
            # The caller reads next, and that pauses if it fails as well.
            self._pool.pause(max(0.0, min(_FIRST_PAUSE, deadline - time.monotonic())))
        else:
            raise failure.error from failure.cause
        raise WatchEnded(str(failure.error))

    def _attempt(
        self, endpoint: Endpoint, method: str, body: bytes, deadline: float, token: str
    ) -> Message:
        started, result, answer = RECORDER.ticks(), _FAILED, b""
        try:
            status, answer = self._pool.exchange(
                endpoint, "POST", f"/v3/{method}", body, _headers(token), deadline
            )
            message = self._parsed(endpoint, status, answer)
            result = _OK_RESULT
        except RequestFailed as failed:
            result = _UNKNOWN if failed.failure.sent else _FAILED
            raise
        finally:
            self.traffic.add_request(
                method,
                str(endpoint),
                result,
                started,
                sent=len(body),
                received=len(answer),
            )
        return message

    def _parsed(self, endpoint: Endpoint, status: int, answer: bytes) -> Message:
        """Return the message in an answer."""
        try:
            message = messages.load(answer)
            if status == _OK:
                messages.check(message)
        except ValueError:
            raise RequestFailed(self._not_the_api(endpoint, status, answer)) from None
        self._pool.reached = True
        if status == _OK:
            return message
        raise RequestFailed(answer_failure(str(endpoint), message, status))

    def _log_in(self, endpoint: Endpoint, deadline: float) -> str:
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
                endpoint, _AUTHENTICATE, json.dumps(request).encode(), deadline, ""
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
        self, connection: Connection, endpoint: Endpoint, deadline: float
    ) -> Iterator[Message]:
        status, lines = connection.read_stream(deadline)
        for line in lines:
            message = self._parsed(endpoint, status, line)
            if "error" in message:
                raise RequestFailed(answer_failure(str(endpoint), message, status))
            yield message.get("result", {})
        raise ConnectionResetError("the watch ended")

    def _not_the_api(self, endpoint: Endpoint, status: int, answer: bytes) -> Failure:
        """Return the failure for an answer that no v3 API gives."""
        if answer.startswith(_COMMON_NAME):
            return Failure(
                error=EtcdDeniedError(
                    f"etcd at {endpoint} has users, and then accepts no client"
                    " certificate with a common name over its JSON API: use one"
                    " without a common name"
                )
            )
        where = f"the server at {endpoint}"
        if status == _NOT_FOUND:
            text = f"{where} has no JSON API of etcd v3{self._version(endpoint)}"
        else:
            text = f"{where} does not answer as etcd does (HTTP status {status})"
        if status == _OK:
            return Failure(error=EtcdError(text), sent=True)
        return proxy_failure(EtcdError(text), status)

    def _version(self, endpoint: Endpoint) -> str:
        """Return why a server has no v3 API, as far as its version shows."""
        limit = time.monotonic() + _VERSION_SECONDS
        try:
            _, answer = self._pool.exchange(endpoint, "GET", "/version", b"", {}, limit)
            found = _VERSION.fullmatch(str(messages.load(answer).get("etcdserver")))
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
