"""Tell of a rendezvous what torch does not: who came, while it waits and at last."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

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
from tracedstore.signals import names

_MOST_NODES_TOLD = 1024
_MOST_NODES_IN_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rendezvous that failed.

    Attributes:
        backend: Through which backend.
        run_id: Of which job.
        endpoint: Where the nodes were to meet.
        during: In which call.
        waited_seconds: How long that took.
        min_nodes: How many nodes the job needs.
        max_nodes: How many it takes.
        where: Host and port of the endpoint, where it has them.
        own: The node that failed.
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


def tell_waiting(failure: Failure) -> None:
    """Write who has come, while a node waits for the others."""
    facts, came = _attended(failure)
    RECORDER.emit(
        names.RENDEZVOUS_WAITING,
        said=f"{_what(failure)} is not complete after"
        f" {failure.waited_seconds:.1f} s{came}",
        **facts,
    )


def tell(error: Exception, failure: Failure) -> None:
    """Write the event, and give the exception the words it lacks.

    The exception stays what it is: an empty one gets a text, and one that has its
    text gets a note, which a traceback shows below it.
    """
    diagnosis = _diagnosed(error, failure, failure.attendance or Attendance())
    facts, came = _attended(failure)
    said = f"{_what(failure)} failed after {failure.waited_seconds:.1f} s"
    if diagnosis.remedy:
        said += f": {diagnosis.remedy}"
    said += came
    timed_out = isinstance(error, RendezvousTimeoutError)
    RECORDER.emit(
        names.RENDEZVOUS_TIMEOUT if timed_out else names.RENDEZVOUS_FAILED,
        said=said,
        cause=diagnosis.cause,
        error_type=TIMEOUT if timed_out else error_type(error),
        error=error_message(error),
        during=failure.during,
        causes=list(diagnosis.causes),
        **facts,
    )
    if not str(error):
        error.args = (said,)
    else:
        error.add_note(said)


def _attended(failure: Failure) -> tuple[dict[str, Any], str]:
    """Give the fields that tell who was there, and the same in words."""
    attendance = failure.attendance or Attendance()
    now = time.time()
    joined = attendance.joined(failure.own)
    waiting = attendance.waiting(failure.own)
    left = attendance.left(failure.own)
    silent = {
        "joined": attendance.silent(joined, now),
        "waiting": attendance.silent(waiting, now),
        "left": attendance.silent(left, now),
    }
    last = attendance.last
    facts = {
        "waited_seconds": round(failure.waited_seconds, 3),
        "joined_count": len(joined),
        "min_nodes": failure.min_nodes,
        "max_nodes": failure.max_nodes,
        "joined": _addresses(joined),
        "joined_silent_seconds": silent["joined"][:_MOST_NODES_TOLD],
        "waiting": _addresses(waiting),
        "waiting_silent_seconds": silent["waiting"][:_MOST_NODES_TOLD],
        "left": _addresses(left),
        "left_silent_seconds": silent["left"][:_MOST_NODES_TOLD],
        "run_id": failure.run_id,
        "backend": failure.backend,
        "endpoint": failure.endpoint,
        "round": None if last is None else last.round,
        "complete": None if last is None else last.complete,
        "closed": None if last is None else last.closed,
    }
    said = ""
    if failure.attendance is not None:
        said = f"; {len(joined)} of {_wanted(failure)} nodes joined"
        if joined:
            said += f": {_named(joined, silent['joined'])}"
        if waiting:
            said += f"; on the wait list: {_named(waiting, silent['waiting'])}"
    if left:
        said += f"; were there and left: {_named(left, silent['left'])}"
    return facts, said


def _what(failure: Failure) -> str:
    where = f"at {failure.endpoint} " if failure.endpoint else ""
    return f"rendezvous '{failure.run_id}' {where}through {failure.backend}"


def _diagnosed(error: Exception, failure: Failure, attendance: Attendance) -> Diagnosis:
    diagnosis = diagnose(error, failure.where)
    if diagnosis.cause != UNKNOWN or not isinstance(error, RendezvousTimeoutError):
        return diagnosis
    last = attendance.last
    full = last is not None and last.complete
    return Diagnosis(NO_ROOM if full else TOO_FEW_NODES, diagnosis.causes)


def _wanted(failure: Failure) -> str:
    if failure.min_nodes == failure.max_nodes:
        return str(failure.min_nodes)
    return f"{failure.min_nodes} to {failure.max_nodes}"


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
