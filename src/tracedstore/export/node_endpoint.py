"""Which process serves the metrics of a worker: the worker, or torchrun's agent.

With ``http_scope=node``, an agent that has an endpoint passes its address to the
workers that it starts, in a variable. These do not listen then: the agent asks them
over their Unix sockets.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tracedstore import names
from tracedstore.common import validation
from tracedstore.local.sockets import LOCAL_SOCKET
from tracedstore.recording.recorder import RECORDER

# The pid of the agent, and the URL of its metrics.
_VARIABLE: Final = "TRACEDSTORE_NODE_ENDPOINT"

# The URL of the metrics that this process serves for workers too, if it has any.
_offered: str | None = None


@dataclass(frozen=True, slots=True)
class NodeEndpoint:
    """The endpoint of an agent.

    Attributes:
        url: The URL of its metrics.
        pid: The pid of the agent.
    """

    url: str
    pid: int


def offer(url: str | None) -> None:
    """Serve the workers that this process starts from now on; None for no more."""
    global _offered  # noqa: PLW0603 - a process has one endpoint
    _offered = url


@contextmanager
def announced() -> Iterator[None]:
    """Tell processes that are started meanwhile that this one serves their metrics.

    They serve their own if this process has no endpoint, or no socket to ask over.
    """
    if _offered is not None:
        RECORDER.failures.guarded(names.ENDPOINT, LOCAL_SOCKET.start)
    before = os.environ.pop(_VARIABLE, None)
    if _offered is not None and LOCAL_SOCKET.listening:
        os.environ[_VARIABLE] = f"{os.getpid()} {_offered}"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before


def of_agent() -> NodeEndpoint | None:
    """Return the endpoint at which the agent serves this process.

    None if no agent does, and if this process is not its worker: what a worker starts
    inherits the variable, and the agent does not know it.
    """
    pid, _, url = os.environ.get(_VARIABLE, "").partition(" ")
    try:
        found = NodeEndpoint(
            validation.http_url(url),
            validation.digits(pid.encode(), validation.MAX_PID),
        )
    except ValueError:
        return None
    return found if found.pid == os.getppid() else None
