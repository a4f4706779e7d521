"""More arrivals than ranks: a counter that an earlier attempt or another job raised.

The last rank to arrive ends the wait, if it counts exactly as many arrivals as there
are ranks. A counter that is past that number ends no wait any more.
"""

import time
from typing import Any

from tracedstore.common import validation
from tracedstore.common.causes import REMEDIES
from tracedstore.coordination.arrivals import read_key
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe import groups, incarnations
from tracedstore.diagnosis.observe.blocked_call import Member
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, read_blocked
from tracedstore.diagnosis.observe.torch_keys import meaning

_MAX_COUNT = 2**63


def find_excess(
    connection: Any, registry: Any, own: BlockedRecord, member: Member
) -> Verdict | None:
    """Return a verdict if more ranks arrived than there are.

    Args:
        connection: A connection to the store of the blocked call.
        registry: A connection to the store in which the ranks registered.
        own: The record of that call.
        member: The rank of this process.
    """
    known = meaning(own.keys[0]) if own.keys else None
    if known is None or known.counter is None:
        return None
    if known.group_name and groups.members(known.group_name) is None:
        return None
    size = member.world_size if own.members is None else len(own.members)
    count = _read_count(connection, known.counter)
    if count <= size:
        return None
    waiting = {
        rank
        for rank, record in read_blocked(registry, member.world_size).items()
        if (record.phase, record.attempt, record.failed)
        == (own.phase, own.attempt, None)
    }
    launches = incarnations.launches_in(incarnations.read_replacements(registry))
    return Verdict(
        phase=own.phase,
        cause="too_many",
        known=f"{count} arrivals were counted for {size} ranks",
        waiting_ranks=tuple(sorted({own.rank, *waiting})),
        key=own.keys[0],
        waited_seconds=max(0.0, time.time() - own.started),
        evidence=(
            f"{known.counter} is {count}",
            *(f"registered: {launch}" for launch in launches),
        ),
        remedy=REMEDIES["too_many"],
        time=time.time(),
    )


def _read_count(connection: Any, counter: str) -> int:
    """Return the count; 0 if there is none, or the value is no number."""
    if not connection.check([counter]):
        return 0
    try:
        return validation.digits(read_key(connection, counter), _MAX_COUNT)
    except ValueError:
        return 0
