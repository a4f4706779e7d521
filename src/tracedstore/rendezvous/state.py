"""The state that the nodes of a rendezvous share, and the nodes that were seen in it.

torch stores a pickle of its ``_RendezvousState``, and unpickles what it reads. It is
read as plain data here. Other bytes are not an error: `parse_state` returns None.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeVar

from tracedstore.common.election import first_of
from tracedstore.rendezvous import state_pickle

# Seconds between two heartbeats of a node, by default.
DEFAULT_INTERVAL: Final = 5.0
# Seconds. Less is not reported: clocks of healthy machines differ, too.
MIN_SKEW: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Node:
    """A node of the rendezvous: an agent, not a machine.

    Attributes:
        addr: Its address or fully qualified name.
        pid: Its process id.
        local_id: The number of the handler in that process.
    """

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousState:
    """The state of a rendezvous at one time.

    Attributes:
        round: The round, starting at 0.
        complete: The round has all its nodes.
        closed: No node can join any more.
        participants: The nodes that joined the round; their ranks are valid once it is
            complete.
        wait_list: The nodes that wait for the next round.
        heartbeats: The last heartbeat of each node, in seconds since the epoch, by the
            node's clock.
    """

    round: int
    complete: bool
    closed: bool
    participants: Mapping[Node, int]
    wait_list: frozenset[Node]
    heartbeats: Mapping[Node, float]

    @property
    def present(self) -> frozenset[Node]:
        """All nodes that joined or wait."""
        return self.wait_list | self.participants.keys()

    def silent_seconds(self, node: Node, now: float) -> float | None:
        """Return the seconds since a node's last heartbeat, None if it has none."""
        heartbeat = self.heartbeats.get(node)
        # The clock of another machine may be ahead.
        return None if heartbeat is None else max(0.0, now - heartbeat)


@lru_cache(maxsize=4)
def parse_state(state: bytes) -> RendezvousState | None:
    """Parse a state, in bounded time and memory; None if the bytes are something else.

    The latest results are cached: the metrics and the span of a call parse the same
    bytes.
    """
    try:
        attributes = state_pickle.read_state(state)
        nodes: dict[Any, Node] = {}
        return RendezvousState(
            round=_checked(attributes["round"], int),
            complete=_checked(attributes["complete"], bool),
            closed=_checked(attributes["closed"], bool),
            participants={
                _node(node, nodes): _checked(rank, int)
                for node, rank in _checked(attributes["participants"], dict).items()
            },
            wait_list=frozenset(
                _node(node, nodes) for node in _checked(attributes["wait_list"], set)
            ),
            heartbeats={
                _node(node, nodes): _checked(heartbeat, datetime).timestamp()
                for node, heartbeat in _checked(
                    attributes["last_heartbeats"], dict
                ).items()
            },
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _checked(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"not of type {kind.__name__}")
    return value


def _node(parsed: Any, nodes: dict[Any, Node]) -> Node:
    """Return a node; `nodes` has those of the same state that were made already."""
    if parsed not in nodes:
        attributes = _checked(parsed, state_pickle.NodeInstance).attributes
        nodes[parsed] = Node(
            _checked(attributes["addr"], str),
            _checked(attributes["pid"], int),
            _checked(attributes["local_id"], int),
        )
    return nodes[parsed]


@dataclass(slots=True)
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

    value: float
    appeared: float
    seen: float
    changed: bool = False
    skew: float = 0.0


class Heartbeats:
    """The heartbeats of nodes, compared with the clock of this process.

    A node writes its heartbeat with the time of its own clock, and torch removes a node
    whose last heartbeat is older than 15 s by the clock of the node that reads it. So a
    node with a clock that is behind looks dead to all others.

    Two things are certain about a new heartbeat, however slow nodes and store are. Its
    node read its clock before this process read the state. And it read its clock after
    the last write of this process: a write is a compare-and-set, on a state that was
    read before.
    """

    def __init__(self) -> None:
        self._by_node: dict[Node, _Heartbeat] = {}
        # When the last write of this process began; None if new heartbeats cannot be
        # told from older ones.
        self._wrote: float | None = None

    def record(
        self, heartbeats: Mapping[Node, float], *, wrote: float | None = None
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
                known = self._by_node[node] = _Heartbeat(value, seen, seen)
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

    def keep(self, nodes: Iterable[Node]) -> None:
        """Forget all other nodes."""
        kept = set(nodes)
        self._by_node = {n: beat for n, beat in self._by_node.items() if n in kept}
        # One that is seen again is not new.
        self._wrote = None

    def skew_seconds(self, node: Node) -> float | None:
        """Return by how much a node's clock is ahead of this one's, at least.

        The value is negative if it is behind. None: there is no skew that matters, or
        none that is certain.
        """
        known = self._by_node.get(node)
        if known is None or abs(known.skew) < MIN_SKEW:
            return None
        return round(known.skew, 3)

    def silent_seconds(self, node: Node, now: float) -> float | None:
        """Return the seconds since a node's last heartbeat, None if it has none."""
        known = self._by_node.get(node)
        if known is None:
            return None
        written = known.value - (self.skew_seconds(node) or 0.0)
        return round(max(0.0, now - written), 3)

    def is_unchanged(self, node: Node, seconds: float) -> bool:
        """Return whether a node was seen for so long without a new heartbeat."""
        known = self._by_node.get(node)
        return (
            known is not None
            and not known.changed
            and known.seen - known.appeared > seconds
        )


class Attendance:
    """The nodes seen in a rendezvous since its start.

    A node that gives up removes itself from the state. So the last state is not enough:
    the second node to time out would not know the first.
    """

    def __init__(self) -> None:
        # The nodes of the last complete round, and its number.
        self._complete: tuple[int, frozenset[Node]] = 0, frozenset()
        # The ranks of the nodes in this round, also of those that torch has removed
        # from it.
        self._ranks: dict[Node, int] = {}
        self.heartbeats: Heartbeats = Heartbeats()
        # The state before this node changed it.
        self.first: RendezvousState | None = None
        self.last: RendezvousState | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the nodes of this round. Those of the last complete one stay."""
        self._joined: dict[Node, None] = {}
        self._waiting: dict[Node, None] = {}
        self._ranks = {}
        states = [state for state in (self.first, self.last) if state is not None]
        known = (node for state in states for node in state.heartbeats)
        self.heartbeats.keep([*known, *self._complete[1]])
        self.last = None

    def record(self, state: RendezvousState, *, wrote: float | None = None) -> None:
        """Record the nodes of a state.

        Args:
            state: The state.
            wrote: When this process began to write it, in seconds since the epoch; None
                if it read it.
        """
        if self.first is None:
            self.first = state
        if self.last is not None and state.round != self.last.round:
            # The nodes of an earlier round do not count in this one.
            self.reset()
        self.last = state
        if state.complete:
            self._complete = state.round, frozenset(state.participants)
            self._ranks |= state.participants
        for node in state.participants:
            self._joined[node] = None
            self._waiting.pop(node, None)
        for node in state.wait_list:
            self._waiting[node] = None
            self._joined.pop(node, None)
        self.heartbeats.record(state.heartbeats, wrote=wrote)

    def joined(self, own: Node | None) -> list[Node]:
        """List the nodes that joined, and this node even if it has given up."""
        return self._present(self._joined, own)

    def waiting(self, own: Node | None) -> list[Node]:
        """List the nodes on the wait list, and this node even if it has given up."""
        return self._present(self._waiting, own)

    def left(self, own: Node | None) -> list[Node]:
        """List the nodes that were seen and have left."""
        present = {*self.joined(own), *self.waiting(own)}
        seen = {*self._joined, *self._waiting}
        return sorted(seen - present)

    def absent(self, own: Node | None) -> dict[Node, int]:
        """Return the nodes of the last complete round that are not back.

        A node that was started again has another pid: a host that has as many nodes as
        before is back. The values are the number of that round.
        """
        round_number, earlier = self._complete
        present = {*self.joined(own), *self.waiting(own)}
        nodes_by_host = Counter(node.addr for node in earlier)
        nodes_by_host.subtract(node.addr for node in present)
        absent = {node for node in earlier - present if nodes_by_host[node.addr] > 0}
        return dict.fromkeys(sorted(absent - {own}), round_number)

    def silent_seconds(self, nodes: Iterable[Node], now: float) -> list[float | None]:
        """Return the seconds since each node's last heartbeat, None if it has none."""
        return [self.heartbeats.silent_seconds(node, now) for node in nodes]

    @property
    def closed_at_first(self) -> bool:
        """Whether the rendezvous was closed when this node read it first."""
        return self.first is not None and self.first.closed

    def left_over(self, own: Node | None, seconds: float) -> list[Node]:
        """List the nodes that were there before this one and sent no heartbeat since.

        Args:
            own: This node.
            seconds: For how long a node must have been seen without a heartbeat.
        """
        first = frozenset[Node]() if self.first is None else self.first.present
        return sorted(
            node
            for node in first - {own}
            if self.heartbeats.is_unchanged(node, seconds)
        )

    def silent(self, own: Node | None, seconds: float, now: float) -> list[Node]:
        """List the silent nodes of the last complete round, if this node reports them.

        The first two of the other nodes do: one may have lost the store. A closed
        rendezvous has no heartbeats, so none is silent there.

        Args:
            own: This node.
            seconds: For how long a node must have sent no heartbeat.
            now: The time, in seconds since the epoch.
        """
        nodes = sorted(self._complete[1])
        if self.last is None or self.last.closed or own not in nodes:
            return []
        ages = self.silent_seconds(nodes, now)
        silent = {
            node
            for node, age in zip(nodes, ages, strict=True)
            if node != own and age is not None and age > seconds
        }
        return sorted(silent) if own in first_of(nodes, without=silent) else []

    def silent_ranks(
        self, own: Node | None, seconds: float, now: float
    ) -> dict[int, tuple[Node, float]]:
        """Return the silent nodes of this round by rank, with the time of silence.

        A node that torch has removed for its silence is one of them.

        Args:
            own: This node.
            seconds: For how long a node must have sent no heartbeat.
            now: The time, in seconds since the epoch.
        """
        if self.last is None or self.last.closed:
            return {}
        nodes = [node for node in list(self._ranks) if node != own]
        ages = self.silent_seconds(nodes, now)
        return {
            self._ranks[node]: (node, age)
            for node, age in zip(nodes, ages, strict=True)
            if age is not None and age > seconds
        }

    def skewed(self, own: Node | None) -> dict[Node, float]:
        """Return the nodes with another time than this one, and their skew.

        Positive seconds: the clock of the node is ahead.
        """
        nodes = {*self._joined, *self._waiting} - {own}
        skews = {node: self.heartbeats.skew_seconds(node) for node in sorted(nodes)}
        return {node: skew for node, skew in skews.items() if skew is not None}

    def _present(self, nodes: Iterable[Node], own: Node | None) -> list[Node]:
        present = frozenset[Node]() if self.last is None else self.last.present
        return sorted(node for node in nodes if node in present or node == own)
