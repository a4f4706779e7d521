"""Why a rendezvous failed: the chain of exceptions, and what the first of them means.

torch says "the connection has failed, see inner exception"; which inner one matters,
and what it means for who has to mend it, is said here.
"""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tracedstore.core.errors import error_message

_MOST_CAUSES = 8
# Seconds that finding out why nothing answered may take.
_PROBE_WITHIN = 2.0

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
    REFUSED: "nothing listens at the endpoint: it is not started, or it is gone",
    UNREACHABLE: "there is no way to the endpoint from here",
    NO_ANSWER: (
        "the endpoint does not answer: a firewall drops what is sent, or what listens"
        " there is something else"
    ),
    CONNECTION_LOST: (
        "the connection broke: the server was stopped or restarted, or it is an etcd"
        " that wants TLS (protocol=https in --rdzv-conf)"
    ),
    ADDRESS_IN_USE: (
        "the port of the endpoint is taken by another program on this machine"
    ),
    TLS: (
        "the TLS handshake failed: look at protocol, ca_cert, ssl_cert and ssl_cert_key"
        " in --rdzv-conf, and at the certificates' dates"
    ),
    V2_API_OFF: (
        "this etcd answers, but has no v2 API, which torch's etcd backend needs: start"
        " it with --enable-v2 (etcd 3.4 and 3.5 have that, 3.6 does not), or use"
        " --rdzv-backend traced-c10d, which needs no etcd"
    ),
    CORRUPT_STATE: (
        "what stands where the state should be is none: another program writes there"
    ),
    NOT_WRITTEN: (
        "a node that joined did not write what this one waited for: it was stopped"
        " or died right after it joined"
    ),
    TOO_FEW_NODES: "fewer nodes came than the job needs",
    NO_ROOM: "the job runs with the nodes it has, and did not start anew for this one",
    CLOSED: (
        "the rendezvous is closed, because the job has ended or another node gave up;"
        " its run id is used up"
    ),
}

# By the class, or one of its bases, and by name: none of these libraries need be there.
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
# By what torch's C++ and python-etcd say; they have no classes for it.
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
    """What a failure comes down to.

    Attributes:
        cause: Which of the causes above.
        causes: The exceptions from the one that was raised to the first one.
    """

    cause: str
    causes: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """Say what it means, and what to look at; "" where nothing is known."""
        return _REMEDIES.get(self.cause, "")


def diagnose(error: BaseException, where: tuple[str, int] | None = None) -> Diagnosis:
    """Tell why something failed.

    Args:
        error: What was raised.
        where: Host and port of a server that did not answer, to be asked once more:
            torch's TCPStore says of an unknown name and of a closed port alike that
            it timed out.
    """
    chain = list(_chain(error))
    # The last one to be classified is nearest to the root.
    classified = [cause for cause in map(_classify, chain) if cause]
    cause = classified[-1] if classified else UNKNOWN
    if cause in (NO_ANSWER, CONNECTION_LOST) and where is not None:
        cause = _asked(*where) or cause
    return Diagnosis(cause, tuple(map(_told, chain)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Go from an exception to what it came of, as a traceback would."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _MOST_CAUSES:
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__


def _told(error: BaseException) -> str:
    message = error_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _classify(error: BaseException) -> str:
    if type(error) is LookupError:  # EtcdStore's way to say that a key is not there
        return NOT_WRITTEN
    for base in type(error).__mro__:
        if base.__name__ in _BY_CLASS:
            return _BY_CLASS[base.__name__]
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    text = error_message(error).lower()
    # torch's C++ has one class for all that can happen to a connection.
    otherwise = CONNECTION_LOST if type(error).__name__ == "DistNetworkError" else ""
    return next((c for words, c in _BY_TEXT.items() if words in text), otherwise)


def _asked(host: str, port: int) -> str:
    """Connect once, to tell apart what was only said to have timed out."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_WITHIN).close()
    except OSError as error:
        return _classify(error)
    return ""
