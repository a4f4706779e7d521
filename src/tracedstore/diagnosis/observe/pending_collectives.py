"""Collectives of this process that do not end, as waits of its rank."""

import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tracedstore.common.identity import ProcessIdentity, restart_count
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.observe import collective_ledger
from tracedstore.diagnosis.observe.blocked_calls import MAX_SIBLINGS
from tracedstore.diagnosis.observe.blocked_record import COLLECTIVE, BlockedRecord
from tracedstore.diagnosis.observe.collectives import Collectives, StuckCall
from tracedstore.diagnosis.observe.waits import OF_GROUP, Pending, Repeated
from tracedstore.local.rank_threads import rank_threads

# A collective that was called asynchronously may be none that the rank waits for.
_ASYNCHRONOUS: Final = OF_GROUP + 1


@dataclass(slots=True, eq=False, kw_only=True)
class PendingCollective(Pending):
    """A collective, or an operation with one other rank, that does not end.

    Attributes:
        call: What is known about it.
        collectives: What watches it.
        entered: This rank is in its ledger.
    """

    call: StuckCall
    collectives: Collectives
    entered: bool = False

    def describe(
        self,
        connection: Any,
        member: Member,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return where this rank is, and which members of the group are not there."""
        if not self.collectives.lasts(self.call):
            return None
        position, attempt = self.call.position, restart_count(os.environ)
        if not self.entered:
            collective_ledger.enter(connection, member.rank, position, attempt)
            self.entered = True
        members = self.call.members
        everyone = members == tuple(range(member.world_size))
        awaits = self.call.peers
        if awaits is None and (complete or also or len(members) <= MAX_SIBLINGS):
            there = collective_ledger.read_entered(
                connection, position, attempt, member.world_size
            )
            awaits = tuple(
                rank
                for rank in sorted(members)
                if rank not in there and rank != member.rank
            )
        # What ranks have in common that are in the same collective.
        together = f"{position.group}/{position.number or position.operation}"
        return BlockedRecord(
            rank=member.rank,
            host=ProcessIdentity().host,
            pid=os.getpid(),
            attempt=attempt,
            operation=position.operation,
            keys=(),
            phase=position.phase,
            protocol=COLLECTIVE,
            group=together if self.call.peers is None else "",
            members=None if everyone else members,
            awaits=awaits,
            started=started,
            collective=position,
        )


class PendingCollectives:
    """The collectives that do not end, each the same object as long as it lasts.

    Args:
        collectives: What watches the groups of this process.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._by_key: dict[Hashable, PendingCollective] = {}

    def pending(self, state: Any) -> list[PendingCollective]:
        """Look at the groups; return the calls that do not end.

        Args:
            state: The store in which the ranks meet.
        """
        found: dict[Hashable, PendingCollective] = {}
        for call in self._collectives.look():
            key = call.identity
            known = self._by_key.get(key)
            if known is None:
                waited = max(0.0, time.time() - call.started)
                known = PendingCollective(
                    key=key,
                    repeated=Repeated(since=time.monotonic() - waited),
                    thread_id=call.thread_id,
                    order=_order(call),
                    state=state,
                    timeout=call.timeout,
                    call=call,
                    collectives=self._collectives,
                )
            known.call = call
            found[key] = known
        self._by_key = found
        return list(found.values())


def _order(call: StuckCall) -> int:
    if not call.is_synchronous:
        return _ASYNCHRONOUS
    return rank_threads().get(call.thread_id, OF_GROUP)
