"""The keys of a barrier, and what stands under them.

The first four are torch's own (``torch/distributed/elastic/utils/store.py``), so that
traced and plain ranks meet in one barrier; the others only we read.
"""

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one barrier."""

    prefix: str

    @property
    def num_members(self) -> str:
        """How many arrived; counted up by each."""
        return f"{self.prefix}/num_members"

    @property
    def last_member(self) -> str:
        """Set by the last one: the barrier is complete."""
        return f"{self.prefix}/last_member"

    def trace(self, rank: int) -> str:
        """Set by a rank that arrived; torch's ranks do so after their timeout."""
        return f"{self.prefix}{rank}/TRACE"

    @property
    def tracing_gate(self) -> str:
        """Set by torch's rank 0 when it has looked who is missing."""
        return f"{self.prefix}/TRACING_GATE"

    @property
    def ledger(self) -> str:
        """Signatures of those that arrived, one after the other."""
        return f"{self.prefix}/ARRIVALS"

    @property
    def traceparent(self) -> str:
        """The trace of the first to arrive; without a ledger, which has it else."""
        return f"{self.prefix}/TRACEPARENT"

    @property
    def repeats(self) -> str:
        """How many arrivals were not the first of their rank; without a ledger."""
        return f"{self.prefix}/REPEATS"

    def again(self, rank: int) -> str:
        """Set by a rank that arrives once more; without a ledger."""
        return f"{self.prefix}{rank}/AGAIN"

    @property
    def verdict(self) -> str:
        """Who was missing when somebody last looked."""
        return f"{self.prefix}/MISSING"


@dataclass(frozen=True, slots=True)
class Last:
    """What the last one to arrive said; plain torch's says nothing.

    Attributes:
        rank: Which it was.
        traceparent: The trace that all ranks share.
    """

    rank: int | None = None
    traceparent: str = ""

    def to_json(self) -> str:
        """Write it, for the others."""
        return json.dumps({"rank": self.rank, "traceparent": self.traceparent})

    @classmethod
    def from_bytes(cls, written: bytes) -> "Last":
        """Read it, or nothing where something else stands there."""
        try:
            found = json.loads(written)
            rank, traceparent = found["rank"], found["traceparent"]
        except (ValueError, TypeError, KeyError):
            return cls()
        return cls(rank if isinstance(rank, int) else None, str(traceparent))


# One entry of the ledger: a rank, and when it arrived, in seconds since the epoch.
_SIGNATURE = struct.Struct(">Id")
# No rank is this high: entries from here on spell, piece by piece, the traceparent of
# the first to arrive, so that one read tells all.
_SPELLED = 0xFFFFFFF0
_PIECE = struct.Struct(">I8s")
_PIECES = 7  # of eight characters, for a traceparent's 55


def signature(rank: int, arrived: float) -> bytes:
    """Write the signature of one rank."""
    return _SIGNATURE.pack(rank, arrived)


def spelled(traceparent: str) -> bytes:
    """Write a traceparent, as entries for the ledger."""
    text = traceparent.encode()
    pieces = (text[8 * n : 8 * n + 8] for n in range(_PIECES))
    return b"".join(_PIECE.pack(_SPELLED + n, piece) for n, piece in enumerate(pieces))


class Ledger:
    """What those that arrived wrote; a torn entry at the end is left out.

    Attributes:
        entries: As it stands in the store.
    """

    __slots__ = ("_spelled_at", "entries")

    def __init__(self, entries: bytes = b"") -> None:
        self.entries = entries
        self._spelled_at = _find_spelled(entries)

    def ranks(self) -> Sequence[int]:
        """Read who signed, in the order in which they did, as often as they did.

        All at once: one entry after the other takes many times as long, which counts
        where sixteen thousand signed and everybody waits.
        """
        whole = len(self.entries) - len(self.entries) % _SIGNATURE.size
        words = array("I", self.entries[:whole])
        if sys.byteorder == "little":
            words.byteswap()
        ranks = words[:: _SIGNATURE.size // words.itemsize]
        start = self._spelled_at
        if start is not None:
            first = start // _PIECE.size
            del ranks[first : first + _PIECES]
        return ranks

    def times(self) -> list[float]:
        """Read when they signed, in the same order, each by its own clock."""
        whole = len(self.entries) - len(self.entries) % _SIGNATURE.size
        signed = _SIGNATURE.iter_unpack(self.entries[:whole])
        return [arrived for rank, arrived in signed if rank < _SPELLED]

    def traceparent(self) -> str:
        """Read the trace of the first to arrive, "" if it left none."""
        start = self._spelled_at
        if start is None:
            return ""
        spelt = self.entries[start : start + _PIECES * _PIECE.size]
        text = b"".join(piece for _, piece in _PIECE.iter_unpack(spelt))
        return text.rstrip(b"\0").decode("ascii", "replace")


def _find_spelled(entries: bytes) -> int | None:
    """Find where a traceparent begins, without reading the rest.

    The pieces of one are written at once, so they stand together.
    """
    mark = _SPELLED.to_bytes(4)
    start = entries.find(mark)
    while start >= 0 and start % _PIECE.size:
        start = entries.find(mark, start + 1)
    there = 0 <= start <= len(entries) - _PIECES * _PIECE.size
    return start if there else None
