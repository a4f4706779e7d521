"""Why the missing ranks of a barrier do not arrive."""

import os
import time
from collections.abc import Sequence
from typing import Any

from tracedstore.common.identity import restart_count
from tracedstore.coordination import membership, rank_registry
from tracedstore.coordination.missing_report import Finding
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.ask.examine import examine
from tracedstore.diagnosis.judgement import judge
from tracedstore.diagnosis.judgement.verdict import MAX_AWAITED
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, read_blocked
from tracedstore.local.facts import ProcessFacts
from tracedstore.local.host_ranks import known_ranks
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.local.socket_client import ask_processes

# Seconds for the processes of missing ranks to answer, on this host and elsewhere. The
# verdict of a barrier is due within 5 s of its timeout.
_HOST_TIMEOUT = 0.5
_ANSWER_TIMEOUT = 1.5


def find_causes(
    store: Any, ranks: Sequence[int], world_size: int
) -> dict[int, Finding]:
    """Return why the first 64 of these ranks do not arrive, as far as it is known.

    Args:
        store: A connection that no other thread uses.
        ranks: Ranks that did not arrive.
        world_size: The number of ranks.
    """
    if membership.of(store) is not None:
        return {}  # agents do not register
    first = list(ranks[:MAX_AWAITED])
    attempt = restart_count(os.environ)
    registered = {
        rank: info
        for rank, info in rank_registry.read_ranks(store, first).items()
        if info.attempt == attempt
    }
    # Only ranks that have registered: one that does not answer must not delay the
    # verdict, and any process of this host may be one that has not registered.
    pids = [info.pid for info in registered.values()]
    replies = ask_processes(pids, "status", _HOST_TIMEOUT) if pids else {}
    answers = known_ranks(
        replies, registered, registered, LocalIdentity.own(), _HOST_TIMEOUT
    )
    elsewhere = registered.keys() - answers.keys()
    if elsewhere:
        answers |= examine(store, registered, elsewhere, world_size, _ANSWER_TIMEOUT)
    now = time.time()
    current = {
        rank: record
        for rank, record in read_blocked(store, world_size).items()
        if record.attempt == attempt
        and record.is_of_stall(now)
        and judge.still_waits(record, answers.get(rank), now)
    }
    return {
        rank: _finding(rank, answers.get(rank), registered.get(rank), current.get(rank))
        for rank in first
    }


def _finding(
    rank: int,
    answer: ProcessFacts | None,
    info: RankInfo | None,
    record: BlockedRecord | None,
) -> Finding:
    is_of_process = record is not None and (
        (info is None or info.pid == record.pid)
        and (answer is None or answer.state != "stopped")
    )
    if record is not None and is_of_process:
        return Finding("diverged", judge.describe_wait(record), "its blocked call")
    awaited = judge.examine(rank, answer, info, "")
    if answer is None:
        # A rank that is not traced does not register: without an answer there is
        # nothing to add to its name.
        source = "it has registered" if info else "it has not registered"
        return Finding(awaited.cause, "", f"{source}, and no process answers for it")
    return Finding(awaited.cause, awaited.doing, f"its state from {answer.source}")
