"""Tell of a rendezvous what torch does not: who came, while it waits and at last."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from tracedstore import names
from tracedstore.core.errors import TIMEOUT, error_message, error_type
from tracedstore.core.recorder import RECORDER
from tracedstore.rendezvous.causes import (
    NO_ROOM,
    TOO_FEW_NODES,
    UNKNOWN,
    Diagnosis,
    diagnose,
)
from tracedstore.rendezvous.state import Attendance, Node

_MOST_NODES_TOLD = 1024
_MOST_NODES_IN_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAttempt:
    """A node that tries to join, or something else of a rendezvous that may fail.

    Attributes:
        backend: Through which backend.
        run_id: Of which job.
        endpoint: Where the nodes were to meet.
        during: By which call.
        waited_seconds: How long that has taken.
        min_nodes: How many nodes the job needs.
        max_nodes: How many it takes.
        where: Host and port of the endpoint, where it has them.
        own: The node that tries.
        attendance: Who was seen.
    """

    backend: str
    run_id: str
    endpoint: str
    during: str
    waited_seconds: float
    min_nodes: int | None
    max_nodes: int | None
    where: tuple[str, int] | None = None
    own: Node | None = None
    attendance: Attendance | None = None


def tell_waiting(attempt: JoinAttempt) -> None:
    """Write who has come, while a node waits for the others."""
    facts, came = _attended(attempt)
    RECORDER.emit(
        names.RENDEZVOUS_WAITING,
        message=f"{_what(attempt)} is not complete after"
        f" {attempt.waited_seconds:.1f} s{came}",
        **facts,
    )


def tell(error: Exception, attempt: JoinAttempt) -> None:
    """Write the event, and give the exception the words it lacks.

    The exception stays what it is: an empty one gets a text, and one that has its
    text gets a note, which a traceback shows below it.
    """
    diagnosis = _diagnosed(error, attempt, attempt.attendance or Attendance())
    facts, came = _attended(attempt)
    said = f"{_what(attempt)} failed after {attempt.waited_seconds:.1f} s"
    if diagnosis.remedy:
        said += f": {diagnosis.remedy}"
    said += came
    timed_out = isinstance(error, RendezvousTimeoutError)
    RECORDER.emit(
        names.RENDEZVOUS_TIMEOUT if timed_out else names.RENDEZVOUS_FAILED,
        message=said,
        cause=diagnosis.cause,
        error_type=TIMEOUT if timed_out else error_type(error),
        error=error_message(error),
        during=attempt.during,
        causes=list(diagnosis.causes),
        **facts,
    )
    if not str(error):
        error.args = (said,)
    else:
        error.add_note(said)


def _attended(attempt: JoinAttempt) -> tuple[dict[str, Any], str]:
    """Give the fields that tell who was there, and the same in words."""
    attendance = attempt.attendance or Attendance()
    now = time.time()
    joined = attendance.joined(attempt.own)
    waiting = attendance.waiting(attempt.own)
    left = attendance.left(attempt.own)
    silent = {
        "joined": attendance.silent_seconds(joined, now),
        "waiting": attendance.silent_seconds(waiting, now),
        "left": attendance.silent_seconds(left, now),
    }
    last = attendance.last
    facts = {
        "waited_seconds": round(attempt.waited_seconds, 3),
        "joined_count": len(joined),
        "min_nodes": attempt.min_nodes,
        "max_nodes": attempt.max_nodes,
        "joined": _addresses(joined),
        "joined_silent_seconds": silent["joined"][:_MOST_NODES_TOLD],
        "waiting": _addresses(waiting),
        "waiting_silent_seconds": silent["waiting"][:_MOST_NODES_TOLD],
        "left": _addresses(left),
        "left_silent_seconds": silent["left"][:_MOST_NODES_TOLD],
        "run_id": attempt.run_id,
        "backend": attempt.backend,
        "endpoint": attempt.endpoint,
        "round": None if last is None else last.round,
        "complete": None if last is None else last.complete,
        "closed": None if last is None else last.closed,
    }
    said = ""
    if attempt.attendance is not None:
        said = f"; {len(joined)} of {_wanted(attempt)} nodes joined"
        if joined:
            said += f": {_named(joined, silent['joined'])}"
        if waiting:
            said += f"; on the wait list: {_named(waiting, silent['waiting'])}"
    if left:
        said += f"; were there and left: {_named(left, silent['left'])}"
    return facts, said


def _what(attempt: JoinAttempt) -> str:
    where = f"at {attempt.endpoint} " if attempt.endpoint else ""
    return f"rendezvous '{attempt.run_id}' {where}through {attempt.backend}"


def _diagnosed(
    error: Exception, attempt: JoinAttempt, attendance: Attendance
) -> Diagnosis:
    diagnosis = diagnose(error, attempt.where)
    if diagnosis.cause != UNKNOWN or not isinstance(error, RendezvousTimeoutError):
        return diagnosis
    last = attendance.last
    full = last is not None and last.complete
    return Diagnosis(NO_ROOM if full else TOO_FEW_NODES, diagnosis.causes)


def _wanted(attempt: JoinAttempt) -> str:
    if attempt.min_nodes == attempt.max_nodes:
        return str(attempt.min_nodes)
    return f"{attempt.min_nodes} to {attempt.max_nodes}"


def _named(nodes: Sequence[Node], silent: Sequence[float | None]) -> str:
    named = [
        f"{node}" if seconds is None else f"{node}, last heard of {seconds:.1f} s ago"
        for node, seconds in zip(nodes, silent, strict=True)
    ]
    more = len(named) - _MOST_NODES_IN_WORDS
    if more > 0:
        named = [*named[:_MOST_NODES_IN_WORDS], f"and {more} more"]
    return "; ".join(named)


def _addresses(nodes: Sequence[Node]) -> list[Any]:
    return [node.addr for node in nodes[:_MOST_NODES_TOLD]]
