"""Judges the results of a rendezvous against what was injected."""

from collections.abc import Iterator, Sequence

from faults.oracle import (
    ABORTS,
    COLUMNS,
    DISAGREEMENTS,
    HANGS,
    LOST,
    VERDICT_BOUND,
    WRONG,
    Judgement,
    RankRecord,
    aborts,
    events_of,
    exit_hangs,
    lost_counts,
    unreported_stall,
)
from faults.ranks import node_address
from faults.stores import RENDEZVOUS_STORE_TIMEOUT

# Seconds that torch takes to leave the rendezvous after its timeout.
_ROLLBACK = 5.0
_FAILURES = ("rendezvous.timeout", "rendezvous.failed")


def judge_rendezvous(
    nodes: Sequence[RankRecord], min_nodes: int, timeout: float
) -> Judgement:
    """Judge the nodes of one rendezvous.

    An event lists the nodes that joined. A node that never wrote to the state must not
    be listed; a node that was in the state when the reporting node read it must be.
    """
    findings: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for node in nodes:
        findings[ABORTS] += aborts(node)
        findings[HANGS] += _hangs(node, timeout)
        findings[WRONG] += _wrong(node, nodes, min_nodes)
        findings[LOST] += lost_counts(node)
    worlds = {
        node.rank: node.result["world"]
        for node in nodes
        if node.outcome == "completed" and node.result is not None
    }
    late = any("late" in node.steps for node in nodes)
    if len(set(worlds.values())) > 1 and not late:
        findings[DISAGREEMENTS].append(f"the nodes joined worlds of {worlds}")
    return Judgement(findings=findings)


def _hangs(node: RankRecord, timeout: float) -> Iterator[str]:
    if node.killed or not node.steps:
        return
    if node.may_block and node.result is None:
        # torch creates the key through the bare store, before anything is traced.
        if "get:1" in node.steps or "compare_set:1" in node.steps:
            yield from unreported_stall(node)
        return
    bound = timeout + _ROLLBACK + RENDEZVOUS_STORE_TIMEOUT + VERDICT_BOUND
    if node.result is None or node.ended - node.steps["start"] > bound:
        yield f"node {node.rank} had no result after {bound:g} s"
    else:
        yield from exit_hangs(node)


def _wrong(
    node: RankRecord, nodes: Sequence[RankRecord], min_nodes: int
) -> Iterator[str]:
    me = f"node {node.rank}"
    if node.result is None:
        return
    if node.outcome == "completed":
        world = node.result["world"]
        wrote = [
            n for n in nodes if n.steps.get("compare_set:1", node.ended) < node.ended
        ]
        if not min_nodes <= world <= len(wrote):
            yield f"{me} joined a world of {world}, but {len(wrote)} nodes joined"
    if node.outcome == "failed" and not node.may_fail:
        yield f"{me} failed: {node.result.get('error')}"
    if node.log_works:
        yield from _wrong_events(node, nodes)


def _wrong_events(node: RankRecord, nodes: Sequence[RankRecord]) -> Iterator[str]:
    me = f"node {node.rank}"
    events = [event for name in _FAILURES for event in events_of(node, name)]
    if len(events) != (node.outcome != "completed"):
        yield f"{me} ended as {node.outcome} with {len(events)} events"
    for event in events:
        listed = {*event["joined"], *event["waiting"], *event["left"]}
        for other in nodes:
            address = node_address(other.rank)
            if address in listed and "compare_set:1" not in other.steps:
                yield f"{me} listed {address}, which never joined"
            if address not in listed and _was_read(node, other):
                yield f"{me} did not list {address}, which had joined"


def _was_read(reader: RankRecord, other: RankRecord) -> bool:
    """Return whether a node read the state while another one was certainly in it."""
    joined = other.steps.get("joined", float("inf"))
    writes = [at for step, at in other.steps.items() if step.startswith("compare_set:")]
    left = max([at for at in writes if at > joined], default=float("inf"))
    return any(
        joined < at
        and reader.steps.get(step.replace(":", " returned:"), float("inf")) < left
        for step, at in reader.steps.items()
        if step.startswith("get:")
    )
