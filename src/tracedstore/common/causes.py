"""Causes and remedies: of a job that waits, and of a server that cannot be reached.

They are values of metrics and events, and alerts select by them, so that they are in
one module. Barriers, waits and constructors use `Cause`. Every part that connects to a
server uses `classify`: torch has one message for all failures of a TCPStore, and the
exceptions of sockets, etcd clients and torch have little in common. A rendezvous uses
both.
"""

import errno
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tracedstore.common.errors import error_message

# Why a rank does not arrive where others wait for it, the worst first: first what does
# not end by itself.
Cause = Literal[
    "gone",
    "host_silent",
    "not_started",
    "stopped",
    "late",
    "busy",
    "mismatch",
    "diverged",
    "circular",
    "stale",
    "duplicate",
    "too_many",
    "server_gone",
    "server_unreachable",
    "address",
    "all_entered",
    "unknown",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

# What to do about each cause. A verdict with a better remedy has its own.
REMEDIES: Final[Mapping[Cause, str]] = {
    "gone": "read the log of each awaited rank: it ended before the others",
    "host_silent": "check the host of each awaited rank, and the network to it: it is"
    " down, frozen or cut off",
    "not_started": "check that the launcher started each awaited rank, and read its"
    " log",
    "stopped": "resume each awaited process (kill -CONT), or detach the debugger",
    "late": "look at what each awaited rank executes: its process runs, but has not"
    " come to this store yet",
    "busy": "look at what each awaited rank executes: it is alive, but elsewhere",
    "mismatch": "make all ranks call the same collectives in the same order, with equal"
    " sizes",
    "diverged": "make all ranks create the same groups in the same order",
    "circular": "change the order in which these ranks write and wait",
    "stale": "start with a new store, port or prefix: values of an earlier attempt"
    " are in this one",
    "duplicate": "start each rank once: check the launcher's ranks and node ranks",
    "too_many": "use a new key prefix, or a store for each job",
    "server_gone": "read the log of the process that served the store",
    "server_unreachable": "check the network and the process that serves the store",
    "address": "correct the address",
    "all_entered": "check the network and the devices: no rank is late, so the backend"
    " does not end it",
    "unknown": "run tracedstore stacks to see what every rank executes",
}


# What to do about a process that executes nothing, but waits for a device, and about
# one that did not answer. Neither says to end it: it may go on.
BLOCKED_IN_KERNEL: Final = (
    "check the file systems and devices of its host: its system call does not return,"
    " and no signal reaches it"
)
NO_ANSWER_YET: Final = (
    "look at it on its host, with top or py-spy dump: it may be slow, or hold the GIL"
)


def worst(causes: Iterable[Cause]) -> Cause:
    """Return the first of these causes in the order of `CAUSES`."""
    return min(causes, key=CAUSES.index, default="unknown")


# Exceptions of one chain that are described.
_MAX_CHAIN = 8

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
# Of a rendezvous, once it is connected.
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
        remedy="use another port, or resume the process that holds this one if it is"
        " of this job",
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
    V2_API_OFF: ConnectionFailure(
        at_endpoint="this etcd answers, but has no v2 API, which torch's etcd backend"
        " needs: start it with --enable-v2 (etcd 3.4 and 3.5 have that, 3.6 does not),"
        " or use --rdzv-backend traced-c10d, which needs no etcd",
    ),
    CORRUPT_STATE: ConnectionFailure(
        at_endpoint="the value at the state's key is not a rendezvous state: another"
        " program writes to this key",
    ),
    NOT_WRITTEN: ConnectionFailure(
        at_endpoint="a node that joined did not write a key that this node waited for:"
        " it was stopped or died right after it joined",
    ),
    TOO_FEW_NODES: ConnectionFailure(
        at_endpoint="fewer nodes joined than the job needs",
    ),
    NO_ROOM: ConnectionFailure(
        at_endpoint="the job runs with its present nodes, and did not restart for this"
        " one",
    ),
    RANK_0_REPLACED: ConnectionFailure(
        at_endpoint="this node has become rank 0, and torch starts a server for the"
        " workers in the first round only (mended in torch 2.13): set"
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
    ),
    CLOSED: ConnectionFailure(
        at_endpoint="the rendezvous is closed, because the job has ended or another"
        " node gave up; use a new run id",
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


@dataclass(frozen=True, slots=True)
class FailureCause:
    """The cause of a failed rendezvous.

    Attributes:
        cause: One of the constants above.
        chain: The chain of exceptions as text, from the raised one to the root.
    """

    cause: str
    chain: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """What the cause means and what to check; "" if it is unknown."""
        return failure_of(self.cause).at_endpoint


def find_cause(
    error: BaseException, endpoint: tuple[str, int] | None = None
) -> FailureCause:
    """Find the cause of a failed rendezvous in its chain of exceptions.

    torch's message is "the connection has failed, see inner exception".

    Args:
        error: The exception that was raised.
        endpoint: Host and port of the server. If it did not answer, `find_cause`
            connects to it once more, because torch's TCPStore reports a timeout for an
            unknown name and for a closed port too.
    """
    chain = list(_chain(error))
    # The last classified exception is the one nearest to the root.
    classified = [cause for cause in map(classify, chain) if cause]
    cause = classified[-1] if classified else UNKNOWN
    if cause in (NO_ANSWER, CONNECTION_LOST) and endpoint is not None:
        cause = probe_endpoint(*endpoint) or cause
    return FailureCause(cause, tuple(map(_describe, chain)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, in the order of a traceback."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__


def _describe(error: BaseException) -> str:
    message = error_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
