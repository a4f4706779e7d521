"""Compares the heartbeats of a rendezvous with the clock of this process.

A node writes its heartbeat with the time of its own clock, and torch removes a node
whose last heartbeat is older than 15 s by the clock of the node that reads it. So a
node with a clock that is behind looks dead to all others.

Two things are certain about a new heartbeat, however slow nodes and store are. Its node
read its clock before this process read the state. And it read its clock after the last
write of this process: a write is a compare-and-set, on a state that was read before.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

# Seconds between two heartbeats of a node, by default.
DEFAULT_INTERVAL: Final = 5.0
# Seconds. Less is not reported: clocks of healthy machines differ, too.
MIN_SKEW: Final = 5.0

NodeT = TypeVar("NodeT")


class _Heartbeat:
    """The last heartbeat of a node.

    Attributes:
        value: Its time, by the clock of the node.
        appeared: When the node was first seen, by ``time.monotonic``.
        seen: When it was last seen.
        changed: The heartbeat was seen to change.
        skew: By how much the clock of the node is ahead, at least; negative if it is
            behind, 0 if that is not certain.
    """

    __slots__ = ("appeared", "changed", "seen", "skew", "value")

    def __init__(self, value: float, seen: float) -> None:
        self.value = value
        self.appeared = self.seen = seen
        self.changed = False
        self.skew = 0.0


class Heartbeats(Generic[NodeT]):
    """The heartbeats of nodes, as one process reads them."""

    def __init__(self) -> None:
        self._by_node: dict[NodeT, _Heartbeat] = {}
        # When the last write of this process began; None if new heartbeats cannot be
        # told from older ones.
        self._wrote: float | None = None

    def record(
        self, heartbeats: Mapping[NodeT, float], *, wrote: float | None = None
    ) -> None:
        """Record the heartbeats of a state.

        Args:
            heartbeats: The time of each node's last heartbeat, by the node's clock.
            wrote: When this process began to write this state, in seconds since the
                epoch; None if it read it.
        """
        now, seen = time.time(), time.monotonic()
        for node, value in heartbeats.items():
            known = self._by_node.get(node)
            if known is None:
                known = self._by_node[node] = _Heartbeat(value, seen)
            elif known.value == value:
                known.seen = seen
                continue
            else:
                known.changed = True
            known.value, known.seen = value, seen
            # The first heartbeat of a node that was there before may have any age.
            earliest = value if self._wrote is None else self._wrote
            known.skew = max(0.0, value - now) + min(0.0, value - earliest)
        if wrote is not None:
            self._wrote = wrote

    def keep(self, nodes: Iterable[NodeT]) -> None:
        """Forget all other nodes."""
        kept = set(nodes)
        self._by_node = {n: beat for n, beat in self._by_node.items() if n in kept}
        # One that is seen again is not new.
        self._wrote = None

    def skew_seconds(self, node: NodeT) -> float | None:
        """Return by how much a node's clock is ahead of this one's, at least.

        The value is negative if it is behind. None: there is no skew that matters, or
        none that is certain.
        """
        known = self._by_node.get(node)
        if known is None or abs(known.skew) < MIN_SKEW:
            return None
        return round(known.skew, 3)

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
