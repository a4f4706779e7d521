"""What the screen has seen so far, as the events that ``tracedstore report`` reads."""

import re
from collections.abc import Iterator
from typing import Any

from tracedstore import names
from tracedstore.tools.top.model import Barrier, Model, Rank

# Arrivals that are kept, of the newest barriers; a million take about 12 MB.
_MAX_ARRIVALS = 1_000_000
_MAX_STALLS = 1000

_Key = tuple[str, float]


class Seen:
    """Barriers and stalls, each as it was seen last."""

    def __init__(self) -> None:
        self._barriers: dict[_Key, tuple[Barrier, float]] = {}
        self._stalls: dict[tuple[str, float], dict[str, Any]] = {}
        self._ranks: dict[tuple[str, int], Rank] = {}
        self._arrivals = 0

    def add(self, model: Model) -> None:
        """Add what a reading has."""
        for rank in model.ranks:
            if rank.registered is not None:
                self._ranks[rank.name] = rank
        for barrier in (*model.finished, *model.in_progress):
            if barrier.first is None:
                continue
            key = barrier.prefix, barrier.first
            before = self._barriers.get(key)
            new = len(barrier.ranks) - (len(before[0].ranks) if before else 0)
            if before is not None and before[0].complete:
                continue
            self._arrivals += new
            self._barriers[key] = barrier, model.time
            while self._arrivals > _MAX_ARRIVALS:
                self._forget_oldest()
        for fields in model.stalls:
            stall = str(fields["phase"]), float(fields["time"])
            if len(self._stalls) < _MAX_STALLS:
                self._stalls[stall] = dict(fields)

    def _forget_oldest(self) -> None:
        oldest, _ = self._barriers.pop(next(iter(self._barriers)))
        self._arrivals -= len(oldest.ranks)

    def copy(self) -> "Seen":
        """Return a copy, for another thread."""
        other = Seen()
        other._barriers = dict(self._barriers)
        other._stalls = dict(self._stalls)
        other._ranks = dict(self._ranks)
        return other

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that the ranks would have logged."""
        for barrier, seen in self._barriers.values():
            yield from self._barrier(barrier, seen)
        for fields in self._stalls.values():
            # Folded ranks, as in ``0-2,5``: the first one reports.
            first = re.match(r"\d+", str(fields["waiting_ranks"]))
            rank = int(first[0]) if first else 0
            yield self._event(names.JOB_STALLED, fields["time"], "", rank) | {
                name: value for name, value in fields.items() if name != "time"
            }

    def _barrier(self, barrier: Barrier, seen: float) -> Iterator[dict[str, Any]]:
        end = barrier.last if barrier.complete else seen
        size = barrier.world_size or barrier.arrived
        for order, (rank, time) in enumerate(
            zip(barrier.ranks, barrier.times, strict=False), 1
        ):
            name = (
                names.BARRIER_COMPLETED if barrier.complete else names.BARRIER_WAITING
            )
            event = self._event(name, end or seen, barrier.group, rank) | {
                "barrier": barrier.prefix,
                "world_size": size,
                "waited_seconds": max(0.0, (end or seen) - time),
            }
            if barrier.complete:
                event |= {"last_rank": barrier.last_rank, "arrival_order": order}
            else:
                missing = list(barrier.missing_ranks)
                event |= {
                    "arrived_count": barrier.arrived,
                    "missing": barrier.missing,
                    "missing_ranks": missing,
                    "missing_names": [
                        self._host(barrier.group, one) for one in missing
                    ],
                }
            yield event

    def _host(self, group: str, number: int) -> str:
        rank = self._ranks.get((group, number))
        return rank.host if rank is not None else f"rank {number}"

    def _event(self, name: str, time: float, group: str, number: int) -> dict[str, Any]:
        rank = self._ranks.get((group, number))
        event: dict[str, Any] = {
            "event": name,
            "timestamp": time,
            "rank": number,
        }
        if rank is not None:
            event |= {"host": rank.host, "pid": rank.pid}
            if rank.run_id:
                event["run_id"] = rank.run_id
        return event
