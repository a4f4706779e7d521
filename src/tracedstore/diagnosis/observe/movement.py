"""When something last moved in this process, and a record of that while nothing does.

What moves is a Store call that ends, this package's barriers included, and a sequence
number of a process group. A process in which nothing has moved for `stall_after` may
compute for long, or hang in something that this package does not see. Which of both is
not known, so that no event is emitted. `status` and `top` do not call it healthy.

The record is under ``tracedstore/STILL/<rank>``: one write when nothing has moved for
so long, one each time that has doubled, and one when something moves again.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracedstore import names
from tracedstore.common import codec, ranges
from tracedstore.common.codec import Pid, Printable, Rank, Seconds, Words
from tracedstore.common.identity import ProcessIdentity
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.observe.collectives import Collectives, place_of
from tracedstore.local.facts import LAST_CALL
from tracedstore.recording.cold_metrics import Labels
from tracedstore.recording.recorder import RECORDER

# The key of a rank is this, a slash, and the rank.
STILL: Final = "tracedstore/STILL"
_MAX_RECORD_BYTES: Final = 8192
# Groups whose numbers are exported besides the default one: those that have not moved
# for longest.
_MAX_GROUPS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class StillRecord:
    """A process in which nothing moves.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id.
        since: When something moved last, in seconds since the epoch.
        seen: When this was written.
        place: Where its main thread was then; "" if that is unknown.
    """

    rank: Rank
    host: Printable
    pid: Pid
    since: Seconds
    seen: Seconds
    place: Words = ""

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "StillRecord | None":
        """Decode a record; None if it is empty, malformed or too large."""
        return codec.decode(cls, value, _MAX_RECORD_BYTES, world_size)


class Movement:
    """Notes when something moves in this process.

    Args:
        collectives: What watches the groups of this process.
        stall_after: Seconds after which it is published that nothing does.
    """

    def __init__(self, collectives: Collectives, stall_after: float) -> None:
        self._collectives = collectives
        self._stall_after = stall_after
        self._started = time.monotonic()
        # For how long nothing had moved when that was published last; 0 if it is not.
        self._published = 0.0

    def still_seconds(self) -> float:
        """Return for how long nothing has moved."""
        moved = self._collectives.moved
        still = time.monotonic() - (self._started if moved is None else moved[0])
        # Counting the calls costs more than reading the numbers of groups.
        if still < self._stall_after / 2:
            return still
        idle = LAST_CALL.idle_seconds()
        return still if idle is None else min(still, idle)

    def publish(self, connection: Any, member: Member) -> None:
        """Publish that nothing moves, or that something does again.

        Args:
            connection: A connection to the store of the job.
            member: The rank of this process.
        """
        if not self._collectives.is_on:
            return  # whether collectives move is unknown
        still = self.still_seconds()
        if still < self._stall_after:
            if self._published:
                self._published = 0.0
                connection.set(f"{STILL}/{member.rank}", "")
            return
        if still < 2 * self._published:
            return
        self._published = still
        now = time.time()
        record = StillRecord(
            rank=member.rank,
            host=ProcessIdentity().host,
            pid=os.getpid(),
            since=now - still,
            seen=now,
            place=_place_of_main(),
        )
        connection.set(f"{STILL}/{member.rank}", codec.encode(record))

    # What is exported.

    def export(self) -> None:
        """Export the gauges while this process has a group."""
        if self._collectives.groups:
            RECORDER.cold.begin(self, self, lambda: bool(self._collectives.groups))

    @property
    def group(self) -> tuple[str, ...]:
        """A process has one progress."""
        return ("progress",)

    def gauges(self) -> Iterator[tuple[names.Metric, Labels, float]]:
        """Return the numbers of the default group and of the stillest others."""
        groups = list(self._collectives.groups.values())
        first = [one for one in groups if one.description == "default_pg"]
        others = sorted(
            (one for one in groups if one not in first), key=lambda one: one.moved_at
        )
        for one in (*first[:1], *others[:_MAX_GROUPS]):
            if one.number is not None:
                name = one.description or one.name
                yield names.COLLECTIVE_SEQUENCE, (name,), one.number
        yield names.LAST_PROGRESS, (), time.time() - self.still_seconds()


def _place_of_main() -> str:
    main = threading.main_thread().ident or 0
    # Not in a variable, which would make a cycle.
    return place_of(sys._current_frames().get(main))  # noqa: SLF001
