"""Finds the cause of a failed rendezvous in its chain of exceptions.

torch's message is "the connection has failed, see inner exception". This module selects
the inner exception that matters, and has the remedy for it.
"""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tracedstore.core.errors import error_message

_MAX_CAUSES = 8
# Seconds for connecting once more to an endpoint that did not answer.
_PROBE_TIMEOUT = 2.0

NAME_RESOLUTION = "name_resolution"
REFUSED = "refused"
UNREACHABLE = "unreachable"
NO_ANSWER = "no_answer"
CONNECTION_LOST = "connection_lost"
ADDRESS_IN_USE = "address_in_use"
TLS = "tls"
V2_API_OFF = "v2_api_off"
CORRUPT_STATE = "corrupt_state"
NOT_WRITTEN = "not_written"
TOO_FEW_NODES = "too_few_nodes"
NO_ROOM = "no_room"
CLOSED = "closed"
UNKNOWN = "unknown"

_REMEDIES = {
    NAME_RESOLUTION: "the host name of the endpoint cannot be resolved here",
    REFUSED: "nothing listens at the endpoint: the server is not started, or has ended",
    UNREACHABLE: "there is no route to the endpoint from here",
    NO_ANSWER: (
        "the endpoint does not answer: a firewall drops the packets, or another program"
        " listens there"
    ),
    CONNECTION_LOST: (
        "the connection broke: the server was stopped or restarted, or it is an etcd"
        " that requires TLS (protocol=https in --rdzv-conf)"
    ),
    ADDRESS_IN_USE: "another program on this machine uses the port of the endpoint",
    TLS: (
        "the TLS handshake failed: check protocol, ca_cert, ssl_cert and ssl_cert_key"
        " in --rdzv-conf, and the dates of the certificates"
    ),
    V2_API_OFF: (
        "this etcd answers, but has no v2 API, which torch's etcd backend needs: start"
        " it with --enable-v2 (etcd 3.4 and 3.5 have that, 3.6 does not), or use"
        " --rdzv-backend traced-c10d, which needs no etcd"
    ),
    CORRUPT_STATE: (
        "the value at the state's key is not a rendezvous state: another program writes"
        " to this key"
    ),
    NOT_WRITTEN: (
        "a node that joined did not write a key that this node waited for: it was"
        " stopped or died right after it joined"
    ),
    TOO_FEW_NODES: "fewer nodes joined than the job needs",
    NO_ROOM: "the job runs with its present nodes, and did not restart for this one",
    CLOSED: (
        "the rendezvous is closed, because the job has ended or another node gave up;"
        " use a new run id"
    ),
}

# By the name of the class or of a base, because these libraries may not be installed.
_BY_CLASS = {
    "NameResolutionError": NAME_RESOLUTION,
    "gaierror": NAME_RESOLUTION,
    "ConnectionRefusedError": REFUSED,
    "ConnectionResetError": CONNECTION_LOST,
    "BrokenPipeError": CONNECTION_LOST,
    "RemoteDisconnected": CONNECTION_LOST,
    "IncompleteRead": CONNECTION_LOST,
    "ProtocolError": CONNECTION_LOST,
    "SSLError": TLS,
    "ReadTimeoutError": NO_ANSWER,
    "ConnectTimeoutError": NO_ANSWER,
    "TimeoutError": NO_ANSWER,
    "RendezvousStateError": CORRUPT_STATE,
    "RendezvousClosedError": CLOSED,
}
# By the message text of torch's C++ and python-etcd, which have no classes for these.
_BY_TEXT = {
    "name or service not known": NAME_RESOLUTION,
    "cannot be retrieved (gai error": NAME_RESOLUTION,
    "eaddrinuse": ADDRESS_IN_USE,
    "address already in use": ADDRESS_IN_USE,
    "connection refused": REFUSED,
    "404 page not found": V2_API_OFF,
    "certificate": TLS,
    "wait timeout": NOT_WRITTEN,
    "timeout waiting for key": NOT_WRITTEN,
    "connection reset": CONNECTION_LOST,
    "broken pipe": CONNECTION_LOST,
    "timed out": NO_ANSWER,
    "timeout": NO_ANSWER,
}
_BY_ERRNO = {
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
    errno.EADDRINUSE: ADDRESS_IN_USE,
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failure.

    Attributes:
        cause: One of the constants above.
        causes: The chain of exceptions as text, from the raised one to the root.
    """

    cause: str
    causes: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """What the cause means and what to check; "" if it is unknown."""
        return _REMEDIES.get(self.cause, "")


def diagnose(
    error: BaseException, endpoint: tuple[str, int] | None = None
) -> Diagnosis:
    """Find the cause of a failure.

    Args:
        error: The exception that was raised.
        endpoint: Host and port of the server. If it did not answer, `diagnose`
            connects to it once more, because torch's TCPStore reports a timeout for an
            unknown name and for a closed port too.
    """
    chain = list(_chain(error))
    # The last classified exception is the one nearest to the root.
    classified = [cause for cause in map(_classify, chain) if cause]
    cause = classified[-1] if classified else UNKNOWN
    if cause in (NO_ANSWER, CONNECTION_LOST) and endpoint is not None:
        cause = probe_endpoint(*endpoint) or cause
    return Diagnosis(cause, tuple(map(_describe, chain)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, in the order of a traceback."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _MAX_CAUSES:
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__


def _describe(error: BaseException) -> str:
    message = error_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _classify(error: BaseException) -> str:
    if type(error) is LookupError:  # EtcdStore raises it for a missing key
        return NOT_WRITTEN
    for base in type(error).__mro__:
        if base.__name__ in _BY_CLASS:
            return _BY_CLASS[base.__name__]
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    text = error_message(error).lower()
    # torch's C++ has one class for all connection failures.
    default = CONNECTION_LOST if type(error).__name__ == "DistNetworkError" else ""
    return next((c for part, c in _BY_TEXT.items() if part in text), default)


def probe_endpoint(host: str, port: int) -> str:
    """Connect once; return the cause if that fails, else ""."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
    except OSError as error:
        return _classify(error)
    return ""
