"""Read the state that the nodes of a rendezvous share, as far as it can be read.

torch keeps it as a pickle of its ``_RendezvousState`` and unpickles what it finds. Here
nothing is ever built but what that state is made of, and what is anything else is no
error: it cannot be read, that is all.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

# A node takes some 150 bytes; nobody has a rendezvous of a hundred thousand.
_LARGEST = 16 * 1024 * 1024


@dataclass(frozen=True, order=True)
class Node:
    """A node of the rendezvous: an agent, not a machine.

    Attributes:
        addr: Its address, or its fully qualified name.
        pid: Its process.
        local_id: Which handler of that process.
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
        round: Which round it is, from 0 on.
        complete: The round has all the nodes it takes.
        closed: Nobody can join any more.
        participants: Who joined the round, each with its rank once it is complete.
        wait_list: Who waits for the next one.
        heartbeats: When each node was last heard of, in seconds since the epoch, by
            its own clock.
    """

    round: int
    complete: bool
    closed: bool
    participants: Mapping[Node, int]
    wait_list: frozenset[Node]
    heartbeats: Mapping[Node, float]

    @property
    def present(self) -> frozenset[Node]:
        """Everybody who joined or waits."""
        return self.wait_list | self.participants.keys()

    def silent(self, node: Node, now: float) -> float | None:
        """Tell for how many seconds a node has not been heard of."""
        heard = self.heartbeats.get(node)
        # The clock of another machine may be ahead.
        return None if heard is None else max(0.0, now - heard)


class _State:
    """Stands in for torch's ``_RendezvousState``."""

    round: int
    complete: bool
    closed: bool
    participants: dict[Node, int]
    wait_list: set[Node]
    last_heartbeats: dict[Node, datetime]


_TORCHS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_KNOWN: dict[tuple[str, str], Any] = {
    (_TORCHS, "_RendezvousState"): _State,
    (_TORCHS, "_NodeDesc"): Node,
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
    ("builtins", "set"): set,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of it") from None


@lru_cache(maxsize=4)
def read(state: bytes) -> RendezvousState | None:
    """Read a state; None where it is something else.

    The last ones are remembered: what is read for the metrics is read for the span.
    """
    if len(state) > _LARGEST:
        return None
    try:
        found = _Unpickler(io.BytesIO(state)).load()
        if type(found) is not _State:
            return None
        return RendezvousState(
            round=int(found.round),
            complete=bool(found.complete),
            closed=bool(found.closed),
            participants={
                _node(node): int(rank) for node, rank in found.participants.items()
            },
            wait_list=frozenset(map(_node, found.wait_list)),
            heartbeats={
                _node(node): heard.timestamp()
                for node, heard in found.last_heartbeats.items()
            },
        )
    except Exception:  # whatever a pickle can do
        return None


def _node(found: Any) -> Node:
    if type(found) is not Node:
        raise TypeError("not a node")
    return Node(str(found.addr), int(found.pid), int(found.local_id))


class Attendance:
    """Who was seen at a rendezvous since it began.

    A node that gives up takes itself off the state, so the last state tells too
    little: the first to time out would be unknown to the second.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget who was seen before."""
        self._joined: dict[Node, None] = {}
        self._waiting: dict[Node, None] = {}
        self._heard: dict[Node, float] = {}
        self.last: RendezvousState | None = None

    def saw(self, snapshot: RendezvousState) -> None:
        """Take note of a state."""
        if self.last is not None and snapshot.round != self.last.round:
            # Who was in an earlier round is in this one as well, or is not.
            self.begin()
        self.last = snapshot
        for node in snapshot.participants:
            self._joined[node] = None
            self._waiting.pop(node, None)
        for node in snapshot.wait_list:
            self._waiting[node] = None
            self._joined.pop(node, None)
        self._heard |= snapshot.heartbeats

    def joined(self, own: Node | None) -> list[Node]:
        """List who joined, this node included though it has given up."""
        return self._still(self._joined, own)

    def waiting(self, own: Node | None) -> list[Node]:
        """List who is on the wait list, likewise."""
        return self._still(self._waiting, own)

    def left(self, own: Node | None) -> list[Node]:
        """List who was seen, and is gone."""
        here = {*self.joined(own), *self.waiting(own)}
        seen = {*self._joined, *self._waiting}
        return sorted(seen - here)

    def silent(self, nodes: Iterable[Node], now: float) -> list[float | None]:
        """Tell for how many seconds each has not been heard of."""
        heard = [self._heard.get(node) for node in nodes]
        return [None if at is None else round(max(0.0, now - at), 3) for at in heard]

    def _still(self, nodes: Iterable[Node], own: Node | None) -> list[Node]:
        present = frozenset[Node]() if self.last is None else self.last.present
        return sorted(node for node in nodes if node in present or node == own)
