"""Compares the heartbeats of a rendezvous with the clock of this process.

A node writes its heartbeat with the time of its own clock, and torch removes a node
whose last heartbeat is older than 15 s by the clock of the node that reads it. So a
node with a clock that is behind looks dead to all others. Here a heartbeat is dated by
the two reads of the state between which it changed.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

# Seconds between two heartbeats of a node, by default.
DEFAULT_INTERVAL: Final = 5.0
# Seconds. Less is not reported: a clock is as good as the network and the scheduler.
MIN_SKEW: Final = 5.0
# A process may stop between the reading of its clock and the write, once.
_CHANGES_COMPARED: Final = 2

NodeT = TypeVar("NodeT")


class _Heartbeat:
    """The last heartbeat of a node.

    Attributes:
        value: Its time, by the clock of the node.
        appeared: When the node was first seen, by ``time.monotonic``.
        seen: When it was last seen.
        changed: The heartbeat was seen to change.
        skews: Smallest and largest skew that the last changes are consistent with.
    """

    __slots__ = ("appeared", "changed", "seen", "skews", "value")

    def __init__(self, value: float, seen: float) -> None:
        self.value = value
        self.appeared = self.seen = seen
        self.changed = False
        self.skews: tuple[tuple[float, float], ...] = ()


class Heartbeats(Generic[NodeT]):
    """The heartbeats of nodes, as one process reads them."""

    def __init__(self) -> None:
        self._by_node: dict[NodeT, _Heartbeat] = {}
        self._previous_read: float | None = None
        # Seconds of the longest read or write: a write of another node, between the
        # reading of its clock and the moment it takes effect, may take as long.
        self._longest_call = 0.0

    def record(self, heartbeats: Mapping[NodeT, float], started: float) -> None:
        """Record the heartbeats of a state.

        Args:
            heartbeats: The time of each node's last heartbeat, by the node's clock.
            started: When the call that returned the state began, in seconds since the
                epoch.
        """
        now, seen = time.time(), time.monotonic()
        self._longest_call = max(self._longest_call, now - started)
        for node, value in heartbeats.items():
            known = self._by_node.get(node)
            if known is None:
                known = self._by_node[node] = _Heartbeat(value, seen)
            elif known.value == value:
                known.seen = seen
                continue
            else:
                known.changed = True
            # The heartbeats of the first state may have any age.
            if self._previous_read is not None:
                interval = value - now, value - self._previous_read
                known.skews = (*known.skews, interval)[-_CHANGES_COMPARED:]
            known.value, known.seen = value, seen
        self._previous_read = started

    def keep(self, nodes: Iterable[NodeT]) -> None:
        """Forget all other nodes."""
        kept = set(nodes)
        self._by_node = {n: beat for n, beat in self._by_node.items() if n in kept}

    def skew_seconds(self, node: NodeT) -> float | None:
        """Return by how much a node's clock is ahead of this one's, at least.

        The value is negative if it is behind. None: there is no skew that matters, or
        too few changes were seen to tell it from one slow write.
        """
        known = self._by_node.get(node)
        if known is None or len(known.skews) < _CHANGES_COMPARED:
            return None
        ahead = min(low for low, _ in known.skews)
        behind = min(-high for _, high in known.skews) - self._longest_call
        if ahead >= MIN_SKEW:
            return round(ahead, 3)
        return round(-behind, 3) if behind >= MIN_SKEW else None

    def silent_seconds(self, node: NodeT, now: float) -> float | None:
        """Return the seconds since a node's last heartbeat, None if it has none."""
        known = self._by_node.get(node)
        if known is None:
            return None
        written = known.value - (self.skew_seconds(node) or 0.0)
        return round(max(0.0, now - written), 3)

    def is_unchanged(self, node: NodeT, seconds: float) -> bool:
        """Return whether a node was seen for so long without a new heartbeat."""
        known = self._by_node.get(node)
        return (
            known is not None
            and not known.changed
            and known.seen - known.appeared > seconds
        )
