"""What a rank does at a barrier: it arrives, and waits or completes the barrier.

Each of these steps is several calls of the store. On the native base `Meeting` is a
class of store.cpp with the same methods and attributes: in a barrier the caches are
cold, and Python code takes longer than the calls. The one here is for every other
store, and for arguments that C++ does not take. Both return what came of it in their
attributes; `barrier.BarrierCall` decides on the steps.
"""

from datetime import timedelta
from typing import Any, Protocol

from tracedstore import names
from tracedstore.coordination.arrivals import read_key, record_arrival
from tracedstore.coordination.protocol import BarrierKeys, is_complete, last_arrival
from tracedstore.recording.recorder import RECORDER


class AnyMeeting(Protocol):
    """What C++ and Python have in common.

    Attributes:
        order: The position of the arrival, from 1; 0 before it.
        arrived: When the store had counted this rank, in ticks.
        in_ledger: The arrival is in the ledger. That it is not fails no barrier.
        is_last: This rank arrived last, and has completed the barrier.
        last: What the last rank wrote; None if it was not or cannot be read.
        entries: As the last rank: the ledger, if it has not each rank once; empty if
            this rank is not in it.
    """

    @property
    def order(self) -> int: ...  # noqa: D102 - see above
    @property
    def arrived(self) -> int: ...  # noqa: D102
    @property
    def in_ledger(self) -> bool: ...  # noqa: D102
    @property
    def is_last(self) -> bool: ...  # noqa: D102
    @property
    def last(self) -> bytes | None: ...  # noqa: D102
    @property
    def entries(self) -> bytes | None: ...  # noqa: D102

    def arrive(self, store: Any) -> None:
        """Record the arrival of the rank, if it is known, and count it."""

    def wait(self, store: Any) -> None:
        """Wait for the last rank, and read what it wrote if the call is observed."""

    def complete(self, store: Any) -> None:
        """Complete the barrier as its last rank, and make a round trip.

        A TCPStore does not acknowledge a set. If this process serves the store and ends
        now, the others get a network error instead of their wake-up. After one round
        trip the server has answered their waits. torch's barrier does the same. Here
        that reads the ledger, if this rank is in it.
        """


class Meeting:
    """An `AnyMeeting` for every store.

    Args:
        prefix: Prefix of the barrier's keys.
        rank: The rank of this process, where it is known.
        world_size: Number of ranks.
        timeout: Seconds to wait.
        observed: A span or an event is made of the call, which needs the last rank.
    """

    def __init__(
        self,
        prefix: str,
        rank: int | None,
        world_size: int,
        timeout: float,
        *,
        observed: bool,
    ) -> None:
        self._keys = BarrierKeys(prefix)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout)
        self._observed = observed
        self.order = self.arrived = 0
        self.in_ledger = self.is_last = False
        self.last: bytes | None = None
        self.entries: bytes | None = None

    def arrive(self, store: Any) -> None:
        """Record the arrival of the rank, if it is known, and count it."""
        self.in_ledger = self._rank is not None and bool(
            RECORDER.failures.guarded_call(
                names.BARRIERS, record_arrival, store, self._keys, self._rank
            )
        )
        order = store.add(self._keys.num_members, 1)
        self.arrived = RECORDER.ticks()
        self.order = order

    def wait(self, store: Any) -> None:
        """Wait for the last rank, and read what it wrote if the call is observed."""
        store.wait([self._keys.last_member], self._timeout)
        if self._observed:
            self.last = self._read(store, self._keys.last_member)

    def complete(self, store: Any) -> None:
        """Complete the barrier as its last rank, and make a round trip."""
        value = last_arrival(self._rank)
        store.set(self._keys.last_member, value)
        if self.in_ledger:
            entries = self._read(store, self._keys.ledger)
            if entries is not None and not is_complete(entries, self._world_size):
                self.entries = entries
        else:
            store.check([self._keys.last_member])
            self.entries = b""
        self.is_last, self.last = True, value.encode()

    def _read(self, store: Any, key: str) -> bytes | None:
        value: bytes | None = RECORDER.failures.guarded_call(
            names.BARRIERS, read_key, store, key
        )
        return value
