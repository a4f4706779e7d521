"""The store keys of a barrier and the layout of their values.

The first four keys are torch's (``torch/distributed/elastic/utils/store.py``), so that
traced ranks and plain torch ranks complete one barrier together. Only tracedstore
reads the other keys.
"""

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tracedstore.coordination import validation

_MAX_LAST_ARRIVAL_BYTES = 4096

# What follows the prefix of a barrier in the keys that every arrival uses.
NUM_MEMBERS = "/num_members"
LAST_MEMBER = "/last_member"
LEDGER = "/ARRIVALS"


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
        return f"{self.prefix}{NUM_MEMBERS}"

    @staticmethod
    def prefix_of(key: str) -> str | None:
        """Return the prefix of a barrier's `num_members` key; None for other keys."""
        return key.removesuffix(NUM_MEMBERS) if key.endswith(NUM_MEMBERS) else None

    @property
    def last_member(self) -> str:
        """Set by the last rank to arrive: the barrier is complete."""
        return f"{self.prefix}{LAST_MEMBER}"

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
        return f"{self.prefix}{LEDGER}"

    @property
    def traceparent(self) -> str:
        """The first rank's traceparent, on stores without a ledger."""
        return f"{self.prefix}/TRACEPARENT"

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
            self.traceparent,
        )

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """Return the keys of one rank."""
        return self.trace(rank), self.repeated(rank), self.counted(rank)


_LEDGER_SUFFIXES = (BarrierKeys("").ledger, BarrierKeys("").confirmations)


def is_ledger_key(key: str) -> bool:
    """Return whether a key is the ledger of a barrier; ledgers may be large."""
    return key.endswith(_LEDGER_SUFFIXES)


@dataclass(frozen=True, slots=True)
class LastArrival:
    """The value of the `last_member` key, written by the last rank to arrive.

    A plain torch rank writes neither of the two fields.

    Attributes:
        rank: The last rank to arrive.
        traceparent: The trace that all ranks share.
    """

    rank: int | None = None
    traceparent: str = ""

    def to_json(self) -> str:
        """Return the value to write to the store."""
        if not self.traceparent:
            # The same, in a fifth of the time.
            rank = "null" if self.rank is None else self.rank
            return f'{{"rank": {rank}, "traceparent": ""}}'
        return json.dumps({"rank": self.rank, "traceparent": self.traceparent})

    @classmethod
    def from_bytes(cls, value: bytes) -> "LastArrival":
        """Parse a value; both fields are empty if another program wrote it."""
        try:
            fields = validation.load_json(value, _MAX_LAST_ARRIVAL_BYTES)
            rank, traceparent = fields["rank"], fields["traceparent"]
            if rank is not None:
                validation.integer(rank, _FIRST_TRACEPARENT_ENTRY)
            return cls(rank, validation.text(traceparent) if traceparent else "")
        except (ValueError, TypeError, KeyError):
            return cls()


# One ledger entry: the rank and its time of arrival, in seconds since the epoch.
_ARRIVAL = struct.Struct(">Id")
# Ranks are lower than this. The ledger also has the first rank's traceparent, as
# entries with these numbers instead of a rank, so that one read returns both.
_FIRST_TRACEPARENT_ENTRY = 0xFFFFFFF0
_TRACEPARENT_ENTRY = struct.Struct(">I8s")
_TRACEPARENT_ENTRIES = 7  # of eight characters, for a traceparent's 55


def encode_arrival(rank: int, time: float) -> bytes:
    """Encode the ledger entry of a rank; store.cpp does the same.

    Args:
        rank: The rank that arrived.
        time: When it arrived, in seconds since the epoch.
    """
    return _ARRIVAL.pack(rank, time)


def encode_traceparent(traceparent: str) -> bytes:
    """Encode a traceparent as ledger entries."""
    text = traceparent.encode()
    return b"".join(
        _TRACEPARENT_ENTRY.pack(_FIRST_TRACEPARENT_ENTRY + n, text[8 * n : 8 * n + 8])
        for n in range(_TRACEPARENT_ENTRIES)
    )


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

    __slots__ = ("_traceparent_at", "entries")

    def __init__(self, entries: bytes = b"") -> None:
        self.entries = entries
        self._traceparent_at = _find_traceparent(entries)

    def ranks(self) -> Sequence[int]:
        """Return the ranks in the order of arrival, once per arrival.

        The entries are converted all at once: one at a time takes many times as long,
        which counts with 16,384 entries while all ranks wait.
        """
        whole = len(self.entries) - len(self.entries) % _ARRIVAL.size
        words = array("I", self.entries[:whole])
        if sys.byteorder == "little":
            words.byteswap()
        ranks = words[:: _ARRIVAL.size // words.itemsize]
        start = self._traceparent_at
        if start is not None:
            first = start // _TRACEPARENT_ENTRY.size
            del ranks[first : first + _TRACEPARENT_ENTRIES]
        return ranks

    def times(self) -> list[float]:
        """Return the times of arrival in the same order, each by the rank's clock."""
        whole = len(self.entries) - len(self.entries) % _ARRIVAL.size
        arrivals = _ARRIVAL.iter_unpack(self.entries[:whole])
        return [time for rank, time in arrivals if rank < _FIRST_TRACEPARENT_ENTRY]

    def traceparent(self) -> str:
        """Return the first rank's traceparent, "" if it published none."""
        start = self._traceparent_at
        if start is None:
            return ""
        size = _TRACEPARENT_ENTRIES * _TRACEPARENT_ENTRY.size
        entries = _TRACEPARENT_ENTRY.iter_unpack(self.entries[start : start + size])
        text = b"".join(characters for _, characters in entries)
        return text.rstrip(b"\0").decode("ascii", "replace")


def _find_traceparent(entries: bytes) -> int | None:
    """Return the offset of the traceparent, without decoding the other entries.

    The entries of a traceparent are appended in one call, so they are adjacent.
    """
    mark = _FIRST_TRACEPARENT_ENTRY.to_bytes(4)
    start = entries.find(mark)
    while start >= 0 and start % _TRACEPARENT_ENTRY.size:
        start = entries.find(mark, start + 1)
    size = _TRACEPARENT_ENTRIES * _TRACEPARENT_ENTRY.size
    return start if 0 <= start <= len(entries) - size else None
