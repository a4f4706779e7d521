"""Why a server cannot be reached: one table of causes, meanings and remedies.

Every part that connects to a server uses it: torch has one message for all failures of
a TCPStore, and the exceptions of sockets, etcd clients and torch have little in common.
"""

import errno
import socket
from dataclasses import dataclass
from typing import Final

from tracedstore.common.errors import error_message

# Seconds for connecting once more to an endpoint that did not answer.
_PROBE_TIMEOUT = 2.0

NAME_RESOLUTION = "name_resolution"
REFUSED = "refused"
UNREACHABLE = "unreachable"
NO_ANSWER = "no_answer"
CONNECTION_LOST = "connection_lost"
FOREIGN = "foreign"
# What a listening socket without a store behind it does.
SILENT = "silent"
ADDRESS_IN_USE = "address_in_use"
TLS = "tls"
# And of a rendezvous, once it is connected.
V2_API_OFF = "v2_api_off"
CORRUPT_STATE = "corrupt_state"
NOT_WRITTEN = "not_written"
TOO_FEW_NODES = "too_few_nodes"
NO_ROOM = "no_room"
RANK_0_REPLACED = "rank_0_replaced"
CLOSED = "closed"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFailure:
    """What one cause means to those who connect.

    Attributes:
        brief: Why a server cannot be reached, after a colon; ``{host}`` is its name.
        finding: What a rank finds that cannot connect to its store, with ``{server}``,
            ``{here}`` and ``{somaxconn}``.
        remedy: What to do about that.
        at_endpoint: What an agent finds at the endpoint of its rendezvous, and what to
            do about it.
    """

    brief: str = ""
    finding: str = "connecting to {server} fails from {here}"
    remedy: str = ""
    at_endpoint: str = ""


FAILURES: Final = {
    NAME_RESOLUTION: ConnectionFailure(
        brief="the host name {host!r} cannot be resolved",
        at_endpoint="the host name of the endpoint cannot be resolved here",
    ),
    REFUSED: ConnectionFailure(
        brief="nothing listens there: its server has not started, or has ended",
        finding="{server} refuses connections: no process listens there",
        remedy="start rank 0, and check that it runs at this address",
        at_endpoint="nothing listens at the endpoint: the server is not started, or has"
        " ended",
    ),
    UNREACHABLE: ConnectionFailure(
        brief="there is no route to it from here",
        finding="there is no route to {server} from {here}",
        remedy="check the network, or correct the address",
        at_endpoint="there is no route to the endpoint from here",
    ),
    NO_ANSWER: ConnectionFailure(
        brief="it does not answer in time",
        finding="connecting to {server} times out: packets are dropped on the way, or"
        " the host is down",
        remedy="open this port between the hosts, or correct the address",
        at_endpoint="the endpoint does not answer: a firewall drops the packets, or"
        " another program listens there",
    ),
    CONNECTION_LOST: ConnectionFailure(
        brief="the connection was closed",
        finding="{server} resets connections: its backlog is full (net.core.somaxconn"
        " is {somaxconn} here), or its process has just ended",
        remedy="raise net.core.somaxconn on the serving host, or read the log of rank"
        " 0",
        at_endpoint="the connection broke: the server was stopped or restarted, or it"
        " is an etcd that requires TLS (protocol=https in --rdzv-conf)",
    ),
    SILENT: ConnectionFailure(
        finding="{server} accepts connections and does not answer: its process is"
        " stopped, or it is no store",
        remedy="resume or end the process that holds the port, or use another port",
    ),
    FOREIGN: ConnectionFailure(
        finding="{server} answers, but not as a TCPStore: another program listens"
        " there",
        remedy="use another port",
        at_endpoint="another program answers at the endpoint, not a TCPStore: correct"
        " host and port, or use another port",
    ),
    ADDRESS_IN_USE: ConnectionFailure(
        at_endpoint="another program on this machine uses the port of the endpoint",
    ),
    TLS: ConnectionFailure(
        at_endpoint="the TLS handshake failed: check protocol, ca_cert, ssl_cert and"
        " ssl_cert_key in --rdzv-conf, and the dates of the certificates",
    ),
}
_OTHER: Final = ConnectionFailure()


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
    # The answer to the first request of a TCPStore's client was of another program.
    "ping failed, invalid": FOREIGN,
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


def classify(error: BaseException) -> str:
    """Return the cause of one exception, one of the constants above; "" if unknown."""
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


def failure_of(cause: str) -> ConnectionFailure:
    """Return the row of a cause; one of few words for a cause that has none."""
    return FAILURES.get(cause, _OTHER)


def describe(error: Exception, host: str) -> str:
    """Return in a few words why a server cannot be reached."""
    brief = failure_of(classify(error)).brief.format(host=host)
    return brief or getattr(error, "strerror", None) or str(error) or repr(error)


def probe_endpoint(host: str, port: int) -> str:
    """Connect once; return the cause if that fails, else ""."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
    except OSError as error:
        return classify(error)
    return ""
