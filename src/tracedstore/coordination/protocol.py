"""The store keys of a barrier and the layout of their values.

The first four keys are torch's (``torch/distributed/elastic/utils/store.py``), so that
traced ranks and plain torch ranks complete one barrier together. Only tracedstore
reads the other keys.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tracedstore.common import validation

_MAX_LAST_ARRIVAL_BYTES = 4096
_MAX_RANK = 2**32

_NUM_MEMBERS = "/num_members"


@dataclass(frozen=True, slots=True)
class BarrierKeys:
    """The store keys of one barrier.

    Attributes:
        prefix: The ``key_prefix`` that the caller passed to the barrier.
    """

    prefix: str

    @property
    def num_members(self) -> str:
        """The number of arrivals; each rank adds 1."""
        return f"{self.prefix}{_NUM_MEMBERS}"

    @staticmethod
    def prefix_of(key: str) -> str | None:
        """Return the prefix of a barrier's `num_members` key; None for other keys."""
        return key.removesuffix(_NUM_MEMBERS) if key.endswith(_NUM_MEMBERS) else None

    @property
    def last_member(self) -> str:
        """Set by the last rank to arrive: the barrier is complete."""
        return f"{self.prefix}/last_member"

    def trace(self, rank: int) -> str:
        """Set by a rank that arrived; plain torch ranks set it after their timeout."""
        return f"{self.prefix}{rank}/TRACE"

    @property
    def tracing_gate(self) -> str:
        """Set by torch's rank 0 after it has collected the missing ranks."""
        return f"{self.prefix}/TRACING_GATE"

    @property
    def ledger(self) -> str:
        """The ledger: one entry per arrival, in the order of arrival."""
        return f"{self.prefix}/ARRIVALS"

    @property
    def repeat_count(self) -> str:
        """The number of repeated arrivals, on stores without a ledger."""
        return f"{self.prefix}/REPEATS"

    def repeated(self, rank: int) -> str:
        """Set by a rank that arrives again, on stores without a ledger."""
        return f"{self.prefix}{rank}/AGAIN"

    @property
    def confirmations(self) -> str:
        """A second ledger: ranks that were counted, written after their timeout."""
        return f"{self.prefix}/COUNTED"

    def counted(self, rank: int) -> str:
        """Set after its timeout by a rank that was counted, without a ledger."""
        return f"{self.prefix}{rank}/COUNTED"

    @property
    def missing_report(self) -> str:
        """The latest `MissingReport`."""
        return f"{self.prefix}/MISSING"

    def of_all_ranks(self) -> tuple[str, ...]:
        """Return the keys that are not of one rank."""
        return (
            self.num_members,
            self.last_member,
            self.ledger,
            self.missing_report,
            self.confirmations,
            self.repeat_count,
        )

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """Return the keys of one rank."""
        return self.trace(rank), self.repeated(rank), self.counted(rank)


_LEDGER_SUFFIXES = (BarrierKeys("").ledger, BarrierKeys("").confirmations)


def is_ledger_key(key: str) -> bool:
    """Return whether a key is the ledger of a barrier; ledgers may be large."""
    return key.endswith(_LEDGER_SUFFIXES)


def last_arrival(rank: int | None) -> str:
    """Return the value of the `last_member` key, which the last rank to arrive writes.

    It is what json.dumps returns, in a fifth of the time; store.cpp does the same.
    """
    return f'{{"rank": {"null" if rank is None else rank}}}'


def last_rank(value: bytes) -> int | None:
    """Return the rank in the value of the `last_member` key.

    None if the rank did not know its own, and if another program wrote the value, such
    as torch's barrier.
    """
    try:
        rank = validation.load_json(value, _MAX_LAST_ARRIVAL_BYTES)["rank"]
        return None if rank is None else validation.integer(rank, _MAX_RANK)
    except (ValueError, TypeError, KeyError):
        return None


# One ledger entry: the rank and its time of arrival, in seconds since the epoch.
_ARRIVAL = struct.Struct(">Id")


def encode_arrival(rank: int, time: float) -> bytes:
    """Encode the ledger entry of a rank; store.cpp does the same.

    Args:
        rank: The rank that arrived.
        time: When it arrived, in seconds since the epoch.
    """
    return _ARRIVAL.pack(rank, time)


def is_complete(entries: bytes, world_size: int) -> bool:
    """Return whether a ledger has each rank once, and nothing else.

    Quicker than `Ledger`, and what the last rank reads in almost every barrier.
    """
    size = _ARRIVAL.size
    if len(entries) != size * world_size:
        return False
    return len({entries[at : at + 4] for at in range(0, len(entries), size)}) == (
        world_size
    )


class Ledger:
    """The arrivals at a barrier, as read from its ledger key.

    An incomplete entry at the end is ignored.

    Attributes:
        entries: The value of the key.
    """

    __slots__ = ("entries",)

    def __init__(self, entries: bytes = b"") -> None:
        self.entries = entries

    def ranks(self) -> Sequence[int]:
        """Return the ranks in the order of arrival, once per arrival.

        The entries are converted all at once: one at a time takes many times as long,
        which counts with 16,384 entries while all ranks wait.
        """
        words = array("I", self._whole())
        if sys.byteorder == "little":
            words.byteswap()
        return words[:: _ARRIVAL.size // words.itemsize]

    def times(self) -> list[float]:
        """Return the times of arrival in the same order, each by the rank's clock."""
        return [time for _, time in _ARRIVAL.iter_unpack(self._whole())]

    def _whole(self) -> bytes:
        """Return the entries without an incomplete one."""
        return self.entries[: len(self.entries) - len(self.entries) % _ARRIVAL.size]
