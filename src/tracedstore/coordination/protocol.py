"""The keys of a barrier, and what stands under them.

The first four are torch's own (``torch/distributed/elastic/utils/store.py``), so that
traced and plain ranks meet in one barrier; the others only we read.
"""

import struct
from collections.abc import Iterator
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


# One signature: rank, and when it arrived, in seconds since the epoch.
_SIGNATURE = struct.Struct(">Id")


def signature(rank: int, arrived: float) -> bytes:
    """Write the signature of one rank."""
    return _SIGNATURE.pack(rank, arrived)


def signatures(ledger: bytes) -> Iterator[tuple[int, float]]:
    """Read the signatures of a ledger; a torn one at the end is left out."""
    whole = len(ledger) - len(ledger) % _SIGNATURE.size
    yield from _SIGNATURE.iter_unpack(ledger[:whole])
