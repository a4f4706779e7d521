"""Classifies the exceptions of sockets, torch and etcd by what went wrong."""

import errno
import socket

from tracedstore.common.errors import error_message

# Seconds for connecting once more to an endpoint that did not answer.
_PROBE_TIMEOUT = 2.0

NAME_RESOLUTION = "name_resolution"
REFUSED = "refused"
UNREACHABLE = "unreachable"
NO_ANSWER = "no_answer"
CONNECTION_LOST = "connection_lost"
FOREIGN = "foreign"
ADDRESS_IN_USE = "address_in_use"
TLS = "tls"
V2_API_OFF = "v2_api_off"
CORRUPT_STATE = "corrupt_state"
NOT_WRITTEN = "not_written"
TOO_FEW_NODES = "too_few_nodes"
NO_ROOM = "no_room"
RANK_0_REPLACED = "rank_0_replaced"
CLOSED = "closed"
UNKNOWN = "unknown"

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


def probe_endpoint(host: str, port: int) -> str:
    """Connect once; return the cause if that fails, else ""."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
    except OSError as error:
        return classify(error)
    return ""
