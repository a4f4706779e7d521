"""The exceptions of the etcd v3 store, and how etcd's answers become exceptions.

    TracedStoreError, DistStoreError
    └── EtcdError
        ├── EtcdUnreachableError     no server answered, or the cluster has no leader
        ├── EtcdOutcomeUnknownError  a write may or may not have been applied
        ├── EtcdDeniedError          user, password, certificate or permission
        ├── EtcdCompactedError       the revision does not exist any more
        └── EtcdLeaseError           the lease does not exist

Each text is one sentence with the server and the remedy. No text has a value.
"""

import ssl
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistStoreError

from tracedstore.common.causes import (
    CONNECTION_LOST,
    classify,
    describe,
    failure_of,
)
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.text import printable

_MAX_TEXT = 300
# Codes of gRPC, which the JSON API passes on.
_NOT_FOUND, _DENIED, _EXHAUSTED, _UNAUTHENTICATED = 5, 7, 8, 16
_UNAVAILABLE, _DEADLINE_EXCEEDED = 14, 4
# Codes of OpenSSL for a certificate that names another host or address.
_OTHER_NAME = (62, 64)
_NOT_YET_VALID, _EXPIRED = 9, 10
_SERVER_ERROR = 500
# Of a proxy whose server is down or does not answer in time.
_PROXY_ERRORS = (502, 503, 504)


class EtcdError(TracedStoreError, DistStoreError):
    """A request to etcd failed."""


class EtcdUnreachableError(EtcdError):
    """No server answered in time, or the cluster has no leader."""


class EtcdOutcomeUnknownError(EtcdError):
    """The connection or the leader was lost after a write was sent.

    etcd may have applied the write, or may still apply it. The store does not repeat
    it, because it could be applied twice.
    """


class EtcdDeniedError(EtcdError):
    """etcd rejects the user, the password, the certificate or the access."""


class EtcdCompactedError(EtcdError):
    """The revision that a request reads was compacted."""


class EtcdLeaseError(EtcdError):
    """The lease has expired or was revoked."""


class WatchEnded(Exception):  # noqa: N818 - an ordinary end, never a caller's exception
    """A watch ended without a definite error: the caller reads, and watches again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt of one request.

    Attributes:
        error: What the caller gets if the request is not repeated.
        sent: etcd may have applied the request.
        transient: Another attempt, or another server, may succeed.
        expired: The token is no longer valid.
        cause: The exception of the connection, where there is one.
    """

    error: EtcdError
    sent: bool = False
    transient: bool = False
    expired: bool = False
    cause: Exception | None = None


class RequestFailed(Exception):  # noqa: N818 - never leaves the package
    """Carries the failure of one attempt to the code that repeats it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


def connection_failure(
    where: str, error: OSError, *, sent: bool, hint: str = ""
) -> Failure:
    """Return the failure for a connection that could not be made, or broke.

    Args:
        where: The server.
        error: What happened.
        sent: The request was sent before that.
        hint: A likely reason for a connection that the server closed.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return Failure(error=_certificate_error(where, error), cause=error)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return _tls_failure(where, error, sent=sent)
    closed = isinstance(error, ssl.SSLEOFError)
    cause = CONNECTION_LOST if closed else classify(error)
    if cause == CONNECTION_LOST:
        text = failure_of(cause).brief + hint
    else:
        text = describe(error, where.rpartition(":")[0])
    message = f"etcd at {where} cannot be reached: {text[:_MAX_TEXT]}"
    return Failure(
        error=EtcdUnreachableError(message), sent=sent, transient=True, cause=error
    )


def _certificate_error(where: str, error: ssl.SSLCertVerificationError) -> EtcdError:
    message = f"the certificate of etcd at {where} is not accepted: "
    if error.verify_code == _EXPIRED:
        message += "it has expired"
    elif error.verify_code == _NOT_YET_VALID:
        message += "it is not valid yet; compare the clocks of both hosts"
    elif error.verify_code in _OTHER_NAME:
        message += f"it is for another name ({error.verify_message})"
    else:
        message += (
            f"{error.verify_message}; the certificate of its authority belongs into"
            " the ca_cert of the TLS settings"
        )
    return EtcdDeniedError(message)


def _tls_failure(where: str, error: ssl.SSLError, *, sent: bool) -> Failure:
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "bad certificate" in reason:
        # Old servers send the second one for a missing certificate as well.
        text = (
            f"etcd at {where} requires a valid client certificate of an authority that"
            " it knows: set cert and key in the TLS settings"
        )
    elif "wrong version" in reason or "record layer" in reason:
        text = f"etcd at {where} does not speak TLS: use http:// for it"
    elif "alert" in reason:
        text = (
            f"etcd at {where} rejects the client certificate or the TLS settings:"
            f" {reason}"
        )
    else:
        text = f"TLS with etcd at {where} fails: {reason}"
    denied = EtcdDeniedError(text[: 2 * _MAX_TEXT])
    return Failure(error=denied, sent=sent, cause=error)


def answer_failure(where: str, answer: dict[str, Any], status: int) -> Failure:
    """Return the failure for an error that is an answer, or inside a stream."""
    inner = answer.get("error")
    fields = inner if isinstance(inner, dict) else answer
    code = fields.get("grpc_code", fields.get("code"))
    text = fields.get("message") or inner
    if not isinstance(text, str) or not text:
        text = f"HTTP status {status}"
    message = printable(text[:_MAX_TEXT])
    for kind in _KINDS:
        if kind.matches(code, message):
            told = kind.text.format(etcd=f"etcd at {where}", message=message)
            return Failure(
                error=kind.error(told),
                sent=kind.sent,
                transient=kind.transient,
                expired=kind.expired,
            )
    error = EtcdError(f"etcd at {where} rejects a request: {message}")
    return proxy_failure(error, status)


def proxy_failure(error: EtcdError, status: int) -> Failure:
    """Return the failure for an answer that may be of a proxy before etcd.

    It may have passed the request on.
    """
    if status in _PROXY_ERRORS:
        error = EtcdUnreachableError(str(error))
        return Failure(error=error, sent=True, transient=True)
    return Failure(error=error, sent=status >= _SERVER_ERROR)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of etcd's errors: how to recognise it, and what to make of it."""

    error: type[EtcdError]
    text: str
    codes: tuple[int, ...] = ()
    has: tuple[str, ...] = ("",)
    sent: bool = False
    transient: bool = False
    expired: bool = False

    def matches(self, code: Any, message: str) -> bool:
        known = not self.codes or code in self.codes
        return known and any(part in message for part in self.has)


# The first one that matches counts. A field in braces is filled in.
_KINDS = (
    _Kind(
        EtcdDeniedError,
        "{etcd} requires a user and a password",
        has=("user name is empty",),
        # Authentication may have been enabled since.
        expired=True,
    ),
    _Kind(
        EtcdDeniedError,
        "{etcd} rejects the user or the password",
        has=("invalid user ID or password",),
    ),
    _Kind(
        EtcdDeniedError,
        "{etcd} rejects the token of the user: {message}",
        codes=(_UNAUTHENTICATED,),
        expired=True,
    ),
    _Kind(
        EtcdDeniedError,
        "{etcd} rejects the token of the user: {message}",
        has=("revision of auth store is old",),
        expired=True,
    ),
    _Kind(
        EtcdDeniedError,
        "{etcd} denies access: it needs a user with a role that has read and write"
        " permission for the prefix of the namespace ({message})",
        codes=(_DENIED,),
    ),
    _Kind(
        EtcdError,
        "{etcd} rejects a request because it is too large: it accepts 1.5 MiB by"
        " default, see --max-request-bytes",
        has=("too large", "larger than max"),
    ),
    _Kind(
        EtcdError,
        "the database of {etcd} is full: compact and defragment it, then disarm its"
        " alarm",
        has=("space exceeded",),
    ),
    _Kind(
        EtcdLeaseError,
        "{etcd} does not know the lease: it has expired or was revoked",
        codes=(_NOT_FOUND,),
        has=("lease",),
    ),
    _Kind(
        EtcdCompactedError,
        "{etcd} has compacted the revision that a request reads",
        has=("has been compacted",),
    ),
    # etcd finds these out before it proposes a write to its members, so the write was
    # not applied and can be repeated.
    _Kind(
        EtcdUnreachableError,
        "{etcd} has no leader: most members of its cluster are down or cut off",
        has=("no leader",),
        transient=True,
    ),
    _Kind(
        EtcdUnreachableError,
        "{etcd} cannot serve a request: {message}",
        has=("proposal dropped",),
        transient=True,
    ),
    _Kind(
        EtcdUnreachableError,
        "{etcd} is overloaded: {message}",
        codes=(_EXHAUSTED,),
        transient=True,
    ),
    # A timeout, a change of leader, or a shutdown: the write may have been proposed.
    _Kind(
        EtcdUnreachableError,
        "{etcd} cannot serve a request: {message}",
        codes=(_UNAVAILABLE, _DEADLINE_EXCEEDED),
        sent=True,
        transient=True,
    ),
)
