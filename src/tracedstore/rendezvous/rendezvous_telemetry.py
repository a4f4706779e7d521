"""Events and exception texts of a rendezvous: which nodes joined, and why it failed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from tracedstore import names
from tracedstore.common.causes import (
    CLOSED,
    CONNECTION_LOST,
    FOREIGN,
    NAME_RESOLUTION,
    NO_ANSWER,
    NO_ROOM,
    NOT_WRITTEN,
    RANK_0_REPLACED,
    REFUSED,
    TOO_FEW_NODES,
    UNKNOWN,
    UNREACHABLE,
    Cause,
    FailureCause,
    find_cause,
    probe_endpoint,
)
from tracedstore.common.errors import TIMEOUT, error_message, error_type
from tracedstore.naming.decoders import hosts_never_joined
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.rendezvous.state import DEFAULT_INTERVAL, Attendance, Node

_MAX_NODES_LISTED = 1024
_MAX_NODES_IN_TEXT = 16
_NOT_CONNECTED = frozenset(
    {CONNECTION_LOST, FOREIGN, NAME_RESOLUTION, REFUSED, NO_ANSWER, UNREACHABLE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAttempt:
    """A node's call of its rendezvous handler, mostly to join a round.

    Attributes:
        backend: The name of the backend.
        run_id: The run id of the job.
        endpoint: The endpoint of the rendezvous.
        during: The method that was called.
        waited_seconds: How long the call has taken.
        min_nodes: Number of nodes that the job needs.
        max_nodes: Number of nodes that the job takes.
        where: Host and port of the endpoint, where it has them.
        own: The node that called.
        attendance: The nodes that were seen in the state.
        lacks_server: Whether this node has no server for the workers.
        hint: A further sentence for a connection that failed, "" without one.
        heartbeat_interval: Seconds between two heartbeats of a node.
        written_seconds_ago: Returns when the state was last written, None if that is
            not known.
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
    lacks_server: bool = False
    hint: str = ""
    heartbeat_interval: float = DEFAULT_INTERVAL
    written_seconds_ago: Callable[[], float | None] = lambda: None


class MissingNode(NamedTuple):
    """A node that an incomplete round waits for.

    Attributes:
        node: The node, None if it never joined.
        cause: Why it does not join.
        doing: What is known about it, for people.
        evidence: How that is known, for people.
        host: The host of one that never joined, where the launcher's list shows it.
    """

    node: Node | None
    cause: Cause
    doing: str
    evidence: str
    host: str | None = None


def emit_waiting(attempt: JoinAttempt) -> None:
    """Emit `rendezvous.waiting`: the nodes that joined while this one waits."""
    fields, joined = _attendance(attempt)
    hint = f"; {attempt.hint}" if attempt.hint else ""
    TELEMETRY.emit(
        names.RENDEZVOUS_WAITING,
        message=f"{_title(attempt)} {_progress(attempt)} after"
        f" {attempt.waited_seconds:.1f} s{hint}{joined}{_admission(attempt)}",
        **fields,
    )


def emit_silence(attempt: JoinAttempt, silent: Sequence[Node]) -> None:
    """Emit `rendezvous.waiting` for silent nodes of a round that is complete."""
    fields, _ = _attendance(attempt)
    attendance = attempt.attendance or Attendance()
    seconds = attendance.silent_seconds(silent, time.time())
    TELEMETRY.emit(
        names.RENDEZVOUS_WAITING,
        message=f"{_title(attempt)} is complete, but these nodes are silent:"
        f" {_named(silent, seconds)}; their agents have ended, are stopped or have lost"
        " the store, and their workers may still run",
        **fields,
    )


def emit_failure(error: Exception, attempt: JoinAttempt) -> None:
    """Emit the event of a failure, and add its text to the exception.

    The exception keeps its type. One without a text gets it as its text, any other as
    a note, which a traceback shows.
    """
    attendance = attempt.attendance or Attendance()
    found = _find_cause(error, attempt, attendance)
    fields, joined = _attendance(attempt)
    message = f"{_title(attempt)} failed after {attempt.waited_seconds:.1f} s"
    closed_seconds = None
    if found.cause == CLOSED and attendance.closed_at_first:
        closed_seconds = _closed_before(attendance, attempt.written_seconds_ago)
        message += f": {_describe_closed(attempt.run_id, closed_seconds)}"
    elif found.remedy:
        message += f": {found.remedy}"
    if attempt.hint and found.cause in _NOT_CONNECTED:
        message += f"; {attempt.hint}"
    message += joined
    timed_out = isinstance(error, RendezvousTimeoutError)
    TELEMETRY.emit(
        names.RENDEZVOUS_TIMEOUT if timed_out else names.RENDEZVOUS_FAILED,
        message=message,
        cause=found.cause,
        error_type=TIMEOUT if timed_out else error_type(error),
        error=error_message(error),
        during=attempt.during,
        causes=list(found.chain),
        closed_seconds=closed_seconds,
        **fields,
    )
    if not str(error):
        error.args = (message,)
    else:
        error.add_note(message)


def _attendance(attempt: JoinAttempt) -> tuple[dict[str, Any], str]:
    """Return the event fields for the nodes that were seen, and the same as text."""
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
    missing = _missing(attempt, joined, left, now)[:_MAX_NODES_LISTED]
    # One heartbeat may be late.
    left_over = attendance.left_over(attempt.own, 2 * attempt.heartbeat_interval)
    skewed = attendance.skewed(attempt.own)
    last = attendance.last
    fields = {
        "waited_seconds": round(attempt.waited_seconds, 3),
        "joined_count": len(joined),
        "min_nodes": attempt.min_nodes,
        "max_nodes": attempt.max_nodes,
        "joined": _addresses(joined),
        "joined_silent_seconds": silent["joined"][:_MAX_NODES_LISTED],
        "waiting": _addresses(waiting),
        "waiting_silent_seconds": silent["waiting"][:_MAX_NODES_LISTED],
        "left": _addresses(left),
        "left_silent_seconds": silent["left"][:_MAX_NODES_LISTED],
        "missing_count": _missing_count(attempt, joined),
        "missing_names": [
            each.host if each.node is None else each.node.addr for each in missing
        ],
        "missing_causes": [each.cause for each in missing],
        "missing_doing": [each.doing for each in missing],
        "missing_evidence": [each.evidence for each in missing],
        "left_over": _addresses(left_over),
        "skewed": _addresses(list(skewed)),
        "skewed_seconds": list(skewed.values())[:_MAX_NODES_LISTED],
        "run_id": attempt.run_id,
        "backend": attempt.backend,
        "endpoint": attempt.endpoint,
        "round": None if last is None else last.round,
        "complete": None if last is None else last.complete,
        "closed": None if last is None else last.closed,
    }
    text = ""
    if attempt.attendance is not None:
        text = f"; {len(joined)} of {_expected(attempt)} nodes joined"
        if joined:
            text += f": {_named(joined, silent['joined'])}"
        if waiting:
            text += f"; on the wait list: {_named(waiting, silent['waiting'])}"
    if left:
        text += f"; joined and left: {_named(left, silent['left'])}"
    if others := [each for each in missing if each.node not in left]:
        text += f"; waiting for {_named_missing(others)}"
    if left_over:
        text += f"; {_describe_left_over(left_over, attempt.run_id)}"
    if skewed:
        text += f"; {_describe_skew(skewed)}"
    return fields, text


def _progress(attempt: JoinAttempt) -> str:
    if attempt.attendance is None:
        return "is not connected"
    last = attempt.attendance.last
    if last is None or not last.complete:
        return "is not complete"
    if attempt.own in last.participants:
        return "is complete, but its agents have not exchanged their addresses"
    return "is complete without this node"


def _admission(attempt: JoinAttempt) -> str:
    """Return what lets this node into a round that is complete without it."""
    last = None if attempt.attendance is None else attempt.attendance.last
    if last is None or not last.complete or attempt.own in last.participants:
        return ""
    return (
        "; this node waits for one of them to leave: if it is of another job, start"
        " that with another --rdzv-id"
    )


def _missing_count(attempt: JoinAttempt, joined: Sequence[Node]) -> int:
    """Return how many nodes must still join; 0 if nothing is known about the round."""
    last = None if attempt.attendance is None else attempt.attendance.last
    if last is None or last.complete or last.closed or attempt.min_nodes is None:
        return 0
    return max(0, attempt.min_nodes - len(joined))


def _missing(
    attempt: JoinAttempt, joined: Sequence[Node], left: Sequence[Node], now: float
) -> list[MissingNode]:
    """Return the nodes that the round waits for, those that were there before first.

    A node that was there has left by itself, or its heartbeats ended: the other nodes
    remove it then.
    """
    count = _missing_count(attempt, joined)
    if not count or attempt.attendance is None:
        return []
    absent = attempt.attendance.absent(attempt.own)
    known = [*left, *(node for node in absent if node not in left)]
    skewed = attempt.attendance.skewed(attempt.own)
    missing = []
    for node, seconds in zip(
        known, attempt.attendance.silent_seconds(known, now), strict=True
    ):
        doing, evidence = (
            "left this round",
            "this node saw it in the state of the round",
        )
        if node not in left:
            doing = f"was in round {absent[node]}"
            evidence = "the state of the last complete round has it"
        if seconds is not None:
            doing += f", last heartbeat {seconds:.1f} s ago"
        # A node with a wrong clock is removed by the others while it is alive.
        cause: Cause = "unknown" if node in skewed else "gone"
        if node in skewed:
            evidence += ", and its clock is wrong"
        missing.append(MissingNode(node, cause, doing, evidence))
    never_joined = count - len(missing)
    waiting = attempt.attendance.waiting(attempt.own)
    present = [node.addr for node in (*joined, *known, *waiting)]
    hosts: list[str | None] = []
    if attempt.min_nodes == attempt.max_nodes and attempt.min_nodes is not None:
        hosts += hosts_never_joined(present, attempt.min_nodes)
    if len(hosts) != never_joined:
        hosts = [None] * never_joined
    evidence = f"{len(joined)} of {_expected(attempt)} nodes are in the state"
    return missing + [
        MissingNode(None, "not_started", "never joined", evidence, host)
        for host in hosts
    ]


def _title(attempt: JoinAttempt) -> str:
    where = f"at {attempt.endpoint} " if attempt.endpoint else ""
    return f"rendezvous '{attempt.run_id}' {where}through {attempt.backend}"


def _find_cause(
    error: Exception, attempt: JoinAttempt, attendance: Attendance
) -> FailureCause:
    found = find_cause(error, attempt.where)
    others = {*attendance.joined(attempt.own), *attendance.left(attempt.own)}
    if found.cause == NOT_WRITTEN and not others - {attempt.own}:
        # No other node joined that could have written it: the server has stopped.
        probed = "" if attempt.where is None else probe_endpoint(*attempt.where)
        return FailureCause(probed or NO_ANSWER, found.chain)
    last = attendance.last
    participants = {} if last is None else last.participants
    is_rank_0 = attempt.own is not None and participants.get(attempt.own) == 0
    if isinstance(error, AssertionError) and is_rank_0 and attempt.lacks_server:
        # Before 2.13 torch asserts here that rank 0 has one.
        return FailureCause(RANK_0_REPLACED, found.chain)
    if found.cause != UNKNOWN or not isinstance(error, RendezvousTimeoutError):
        return found
    full = last is not None and last.complete
    return FailureCause(NO_ROOM if full else TOO_FEW_NODES, found.chain)


def _expected(attempt: JoinAttempt) -> str:
    if attempt.min_nodes == attempt.max_nodes:
        return str(attempt.min_nodes)
    return f"{attempt.min_nodes} to {attempt.max_nodes}"


def _named(nodes: Sequence[Node], silent: Sequence[float | None]) -> str:
    named = [
        f"{node}" if seconds is None else f"{node}, last heartbeat {seconds:.1f} s ago"
        for node, seconds in zip(nodes, silent, strict=True)
    ]
    return _name_nodes(named)


def _named_missing(missing: Sequence[MissingNode]) -> str:
    named = [
        f"{each.node or each.host}: {each.doing}"
        for each in missing
        if each.node or each.host
    ]
    unknown = len(missing) - len(named)
    texts = [_name_nodes(named)] if named else []
    if unknown:
        noun = "node that has" if unknown == 1 else "nodes that have"
        texts.append(f"{unknown} {noun} not joined yet")
    return "; ".join(texts)


def _addresses(nodes: Sequence[Node]) -> list[Any]:
    return [node.addr for node in nodes[:_MAX_NODES_LISTED]]


def _closed_before(
    attendance: Attendance, written_seconds_ago: Callable[[], float | None]
) -> float | None:
    """Return the seconds since the last sign of life of a closed rendezvous.

    That is the last write, where the backend knows it, else the newest heartbeat. None
    if neither is known. The caller has checked that it was closed at first sight.
    """
    seconds = None
    try:
        seconds = written_seconds_ago()
    except Exception:
        seconds = None
    if seconds is not None or attendance.first is None:
        return seconds
    newest = max(attendance.first.heartbeats.values(), default=None)
    return None if newest is None else round(max(0.0, time.time() - newest), 3)


def _describe_closed(run_id: str, seconds: float | None) -> str:
    """Describe a rendezvous that was closed before this node came."""
    since = ""
    if seconds is not None:
        moment = datetime.fromtimestamp(time.time() - seconds, UTC)
        since = f", {seconds:.0f} s ago (at {moment:%Y-%m-%dT%H:%M:%SZ})"
    return (
        f"run id '{run_id}' has a rendezvous that was closed before this node"
        f" came{since}: by an earlier run with this run id, or by a node of this run"
        " that ended or gave up; use a new --rdzv-id"
    )


def _describe_left_over(nodes: Sequence[Node], run_id: str) -> str:
    """Describe nodes that were there before this one and are silent since."""
    verb = "was" if len(nodes) == 1 else "were"
    return (
        f"{_name_nodes(list(map(str, nodes)))} {verb} there before this node and sent"
        f" no heartbeat since: left over from an earlier run with run id '{run_id}', or"
        " ended; use a new --rdzv-id for each run"
    )


def _describe_skew(skews: Mapping[Node, float]) -> str:
    """Describe nodes whose clocks differ from the clock of this node."""
    named = [
        f"the clock of {node} is at least {abs(skew):.1f} s"
        f" {'ahead of' if skew > 0 else 'behind'} the clock of this node"
        for node, skew in skews.items()
    ]
    return (
        f"{_name_nodes(named)}: torch removes nodes whose heartbeats look old;"
        " synchronise the clocks"
    )


def _name_nodes(named: Sequence[str]) -> str:
    """Join the texts of nodes; of many, the first and how many there are."""
    more = len(named) - _MAX_NODES_IN_TEXT
    if more > 0:
        named = [*named[:_MAX_NODES_IN_TEXT], f"and {more} more"]
    return "; ".join(named)
