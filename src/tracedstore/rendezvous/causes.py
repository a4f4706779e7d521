"""Finds the cause of a failed rendezvous in its chain of exceptions.

torch's message is "the connection has failed, see inner exception". This module selects
the inner exception that matters, and has the remedy for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tracedstore.common.connection_failures import (
    CLOSED,
    CONNECTION_LOST,
    CORRUPT_STATE,
    NO_ANSWER,
    NO_ROOM,
    NOT_WRITTEN,
    RANK_0_REPLACED,
    TOO_FEW_NODES,
    UNKNOWN,
    V2_API_OFF,
    classify,
    failure_of,
    probe_endpoint,
)
from tracedstore.common.errors import error_message

_MAX_CAUSES = 8

_REMEDIES = {
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
    RANK_0_REPLACED: (
        "this node has become rank 0, and torch starts a server for the workers in the"
        " first round only (mended in torch 2.13): set"
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    ),
    CLOSED: (
        "the rendezvous is closed, because the job has ended or another node gave up;"
        " use a new run id"
    ),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failure.

    Attributes:
        cause: A cause of `common/connection_failures`.
        causes: The chain of exceptions as text, from the raised one to the root.
    """

    cause: str
    causes: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """What the cause means and what to check; "" if it is unknown."""
        return _REMEDIES.get(self.cause) or failure_of(self.cause).at_endpoint


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
    classified = [cause for cause in map(classify, chain) if cause]
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
