"""Sentences about a rendezvous: an earlier run with its run id, and wrong clocks."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from tracedstore.rendezvous.state import Attendance, Node

MAX_NODES_IN_TEXT: Final = 16


def closed_before(
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


def describe_closed(run_id: str, seconds: float | None) -> str:
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


def describe_left_over(nodes: Sequence[Node], run_id: str) -> str:
    """Describe nodes that were there before this one and are silent since."""
    verb = "was" if len(nodes) == 1 else "were"
    return (
        f"{name_nodes(list(map(str, nodes)))} {verb} there before this node and sent no"
        f" heartbeat since: left over from an earlier run with run id '{run_id}', or"
        " ended; use a new --rdzv-id for each run"
    )


def describe_skew(skews: Mapping[Node, float]) -> str:
    """Describe nodes whose clocks differ from the clock of this node."""
    named = [
        f"the clock of {node} is at least {abs(skew):.1f} s"
        f" {'ahead of' if skew > 0 else 'behind'} the clock of this node"
        for node, skew in skews.items()
    ]
    return (
        f"{name_nodes(named)}: torch removes nodes whose heartbeats look old;"
        " synchronise the clocks"
    )


def name_nodes(named: Sequence[str]) -> str:
    """Join the texts of nodes; of many, the first and how many there are."""
    more = len(named) - MAX_NODES_IN_TEXT
    if more > 0:
        named = [*named[:MAX_NODES_IN_TEXT], f"and {more} more"]
    return "; ".join(named)
