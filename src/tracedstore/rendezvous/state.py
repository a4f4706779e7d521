"""Parses the state that the nodes of a rendezvous share.

torch stores a pickle of its ``_RendezvousState``, and unpickles what it reads. The
unpickler here constructs only the types of that state. Other bytes are not an error:
`parse_state` returns None.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

# A node takes about 150 bytes, so this is more than a hundred thousand nodes.
_MAX_STATE_BYTES = 16 * 1024 * 1024


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


class _State:
    """The unpickler's substitute for torch's ``_RendezvousState``."""

    round: int
    complete: bool
    closed: bool
    participants: dict[Node, int]
    wait_list: set[Node]
    last_heartbeats: dict[Node, datetime]


_TORCH_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_TORCH_MODULE, "_RendezvousState"): _State,
    (_TORCH_MODULE, "_NodeDesc"): Node,
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
    ("builtins", "set"): set,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None


@lru_cache(maxsize=4)
def parse_state(state: bytes) -> RendezvousState | None:
    """Parse a state; None if the bytes are something else.

    The latest results are cached: the metrics and the span of a call parse the same
    bytes.
    """
    if len(state) > _MAX_STATE_BYTES:
        return None
    try:
        parsed = _Unpickler(io.BytesIO(state)).load()
        if type(parsed) is not _State:
            return None
        return RendezvousState(
            round=int(parsed.round),
            complete=bool(parsed.complete),
            closed=bool(parsed.closed),
            participants={
                _node(node): int(rank) for node, rank in parsed.participants.items()
            },
            wait_list=frozenset(map(_node, parsed.wait_list)),
            heartbeats={
                _node(node): heartbeat.timestamp()
                for node, heartbeat in parsed.last_heartbeats.items()
            },
        )
    except Exception:  # unpickling can raise anything
        return None


def _node(parsed: Any) -> Node:
    if type(parsed) is not Node:
        raise TypeError("not a node")
    return Node(str(parsed.addr), int(parsed.pid), int(parsed.local_id))


class Attendance:
    """The nodes seen in a rendezvous since its start.

    A node that gives up removes itself from the state. So the last state is not enough:
    the second node to time out would not know the first.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all nodes."""
        self._joined: dict[Node, None] = {}
        self._waiting: dict[Node, None] = {}
        self._heartbeats: dict[Node, float] = {}
        self.last: RendezvousState | None = None

    def record(self, state: RendezvousState) -> None:
        """Record the nodes of a state."""
        if self.last is not None and state.round != self.last.round:
            # The nodes of an earlier round do not count in this one.
            self.reset()
        self.last = state
        for node in state.participants:
            self._joined[node] = None
            self._waiting.pop(node, None)
        for node in state.wait_list:
            self._waiting[node] = None
            self._joined.pop(node, None)
        self._heartbeats |= state.heartbeats

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

    def silent_seconds(self, nodes: Iterable[Node], now: float) -> list[float | None]:
        """Return the seconds since each node's last heartbeat, None if it has none."""
        heartbeats = [self._heartbeats.get(node) for node in nodes]
        return [
            None if heartbeat is None else round(max(0.0, now - heartbeat), 3)
            for heartbeat in heartbeats
        ]

    def _present(self, nodes: Iterable[Node], own: Node | None) -> list[Node]:
        present = frozenset[Node]() if self.last is None else self.last.present
        return sorted(node for node in nodes if node in present or node == own)
