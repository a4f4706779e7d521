"""Distinguishes barriers that a job has abandoned from barriers in progress.

A barrier that timed out keeps its keys, and its job may have continued since.
"""

from collections.abc import Callable, Iterable

from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import BarrierKeys, Ledger, read_ledger
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.tools.attach.job_state import Group
from tracedstore.tools.attach.store_contents import StoreSnapshot


class AbandonedBarriers:
    """The prefixes of abandoned barriers; test one with ``in``.

    A barrier without a ledger is never in it, because arrival times are unknown.
    """

    def __init__(
        self,
        snapshot: StoreSnapshot,
        barriers: Iterable[str],
        group_of: Callable[[str], Group | None],
    ) -> None:
        """Read the time of each rank's latest arrival at any of the barriers.

        Args:
            snapshot: The contents of the store.
            barriers: The prefixes of the barriers to compare.
            group_of: Returns the ranks that a barrier waits for.
        """
        self._snapshot = snapshot
        self._group_of = group_of
        self._registry_keys: dict[str, list[str]] = {}
        for key in snapshot.list_keys():
            if (prefix := rank_registry.prefix_of(key)) is not None:
                self._registry_keys.setdefault(prefix, []).append(key)
        arrivals = [
            (group.prefix, times)
            for barrier in barriers
            if (group := group_of(barrier))
            and (times := _arrival_times(read_ledger(snapshot, BarrierKeys(barrier))))
        ]
        # By group, because rank numbers are unique within a group only.
        self._latest: dict[str, dict[int, float]] = {}
        for prefix, times in sorted(arrivals, key=lambda one: max(one[1].values())):
            self._latest.setdefault(prefix, {}).update(times)

    def __contains__(self, barrier: str) -> bool:
        """Return whether every rank that arrived has continued without the others.

        Each has arrived at another barrier since. Another thread may have done that,
        so each must also have timed out here or run in another process by now.
        """
        keys = BarrierKeys(barrier)
        ledger = read_ledger(self._snapshot, keys)
        times = _arrival_times(ledger)
        unsigned = self._snapshot.add(keys.num_members, 0) - len(ledger.ranks())
        group = self._group_of(barrier)
        if not times or unsigned > 0 or group is None:
            return False
        latest = self._latest.get(group.prefix, {})
        if any(latest.get(rank, time) <= time for rank, time in times.items()):
            return False
        # A rank sets its TRACE key when it times out.
        check = self._snapshot.check
        waiting = {rank for rank in times if not check([keys.trace(rank)])}
        return not waiting or waiting <= self._restarted(barrier, group.ranks)

    def _restarted(self, barrier: str, current: Iterable[RankInfo]) -> set[int]:
        """Return the ranks that run in another process than when the barrier began.

        A restarted job registers under a prefix with another number.
        """
        prefixes = [one for one in self._registry_keys if barrier.startswith(one)]
        keys = self._registry_keys[max(prefixes, key=len)] if prefixes else []
        entries = StoreSnapshot(keys, {key: self._snapshot.get(key) for key in keys})
        registry = rank_registry.read_registry(entries)
        registered = {info.rank: info for info in registry.ranks()}
        return {
            info.rank
            for info in current
            if (before := registered.get(info.rank))
            and (before.host, before.pid) != (info.host, info.pid)
        }


def _arrival_times(ledger: Ledger) -> dict[int, float]:
    return dict(zip(ledger.ranks(), ledger.times(), strict=False))
