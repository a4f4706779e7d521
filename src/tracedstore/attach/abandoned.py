"""Tell the barriers that a job gave up from those that it waits at.

A barrier that timed out keeps its keys, in a job that may have gone on since.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tracedstore.attach.snapshot import StoreSnapshot
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import read_ledger
from tracedstore.coordination.protocol import BarrierKeys, Ledger
from tracedstore.coordination.rank_registry import RankInfo

if TYPE_CHECKING:
    from tracedstore.attach.collect import Group


class AbandonedBarriers:
    """What the ledgers of many barriers tell about one of them.

    Without a ledger nobody knows who came when, and nothing is said.
    """

    def __init__(
        self,
        snapshot: StoreSnapshot,
        barriers: Iterable[str],
        group_of: "Callable[[str], Group | None]",
    ) -> None:
        """Read when each rank last signed anything.

        Args:
            snapshot: What stood in the store.
            barriers: The prefixes of those barriers that are looked at.
            group_of: Gives the ranks that a barrier is for.
        """
        self._snapshot = snapshot
        self._group_of = group_of
        self._homes: dict[str, list[str]] = {}
        for key in snapshot.list_keys():
            if (home := rank_registry.prefix_of(key)) is not None:
                self._homes.setdefault(home, []).append(key)
        signed = [
            (group.prefix, came)
            for one in barriers
            if (group := group_of(one))
            and (came := _signed(read_ledger(snapshot, BarrierKeys(one))))
        ]
        # By group, because the numbers of ranks mean something there only.
        self._last: dict[str, dict[int, float]] = {}
        for place, came in sorted(signed, key=lambda one: max(one[1].values())):
            self._last.setdefault(place, {}).update(came)

    def __contains__(self, barrier: str) -> bool:
        """Tell whether all who came to it have gone on without the others.

        They came to another one since. That alone may be another thread of theirs, so
        they also said that they waited in vain, or are another process by now.
        """
        keys = BarrierKeys(barrier)
        ledger = read_ledger(self._snapshot, keys)
        came = _signed(ledger)
        unsigned = self._snapshot.add(keys.num_members, 0) - len(ledger.ranks())
        group = self._group_of(barrier)
        if not came or unsigned > 0 or group is None:
            return False
        last = self._last.get(group.prefix, {})
        if any(last.get(rank, at) <= at for rank, at in came.items()):
            return False
        waits = {rank for rank in came if not self._snapshot.check([keys.trace(rank)])}
        return not waits or waits <= self._started_anew(barrier, group.ranks)

    def _started_anew(self, barrier: str, now: Iterable[RankInfo]) -> set[int]:
        """Find the ranks that registered in another process than they did before.

        A job that is started anew registers under another number.
        """
        homes = [home for home in self._homes if barrier.startswith(home)]
        keys = self._homes[max(homes, key=len)] if homes else []
        there = StoreSnapshot(keys, {key: self._snapshot.get(key) for key in keys})
        before = {info.rank: info for info in rank_registry.read_all(there)}
        return {
            info.rank
            for info in now
            if (was := before.get(info.rank))
            and (was.host, was.pid) != (info.host, info.pid)
        }


def _signed(ledger: Ledger) -> dict[int, float]:
    return dict(zip(ledger.ranks(), ledger.times(), strict=False))
