"""What somebody found who looked at a barrier, and how it is told and passed on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tracedstore.coordination import decoders, ranges
from tracedstore.coordination.arrivals import Arrivals


@dataclass(frozen=True, kw_only=True)
class MissingReport:
    """Who arrived at a barrier and who did not, with names.

    It holds as long as nobody else arrives, which the count tells.

    Attributes:
        world_size: How many ranks there should be.
        count: How many arrivals were counted.
        unnamed: The ranks that nothing shows to have arrived.
        unidentified: Arrivals that no rank belongs to.
        duplicates: Ranks that arrived more than once.
        names: What the unnamed ranks are called.
        traceparent: The trace of the first to arrive, "" if it left none.
    """

    world_size: int
    count: int
    unnamed: tuple[int, ...]
    unidentified: int
    duplicates: tuple[int, ...]
    names: Mapping[int, str]
    traceparent: str = ""

    @classmethod
    def of(
        cls, arrivals: Arrivals, world_size: int, decoder: decoders.Decoder
    ) -> "MissingReport":
        """Put names to what a look found."""
        found = cls(
            world_size=world_size,
            count=arrivals.count,
            unnamed=arrivals.missing,
            unidentified=arrivals.unidentified,
            duplicates=arrivals.duplicates,
            names={},
            traceparent=arrivals.traceparent,
        )
        return found.named_by(decoder)

    @classmethod
    def nothing(cls, world_size: int) -> "MissingReport":
        """Find nothing, where the store would not let us look."""
        everybody = tuple(range(world_size))
        return cls(
            world_size=world_size,
            count=0,
            unnamed=everybody,
            unidentified=world_size,
            duplicates=(),
            names={},
        )

    def named_by(self, decoder: decoders.Decoder) -> "MissingReport":
        """Put other names to it."""
        names = {rank: decoders.name_of(decoder, rank) for rank in self.unnamed}
        return replace(self, names=names)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are missing for sure: nobody who arrived is called missing."""
        return () if self.unidentified else self.unnamed

    @property
    def possibly_missing(self) -> tuple[int, ...]:
        """Where some arrived without a name: those, and the missing ones."""
        return self.unnamed if self.unidentified else ()

    @property
    def missing_count(self) -> int:
        """How many are missing, whoever they are."""
        return max(0, len(self.unnamed) - self.unidentified)

    @property
    def arrived(self) -> tuple[int, ...]:
        """Ranks that are known to have arrived."""
        # By the ranges between those that did not, who are few.
        found: list[int] = []
        after = 0
        for rank in self.unnamed:
            found += range(after, rank)
            after = rank + 1
        return (*found, *range(after, self.world_size))

    @property
    def missing_names(self) -> tuple[str, ...]:
        """What the missing ranks are called."""
        return tuple(self._name(rank) for rank in self.missing)

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or decoders.nameless(rank)

    def described(self) -> str:
        """Say it, as an operator wants to read it."""
        parts = []
        if self.missing:
            parts.append(ranges.describe(self.missing, self.world_size, self._name))
        elif self.count == 0:
            parts.append("who is missing could not be found out")
        elif self.possibly_missing:
            parts.append(
                f"{self.missing_count} of ranks {ranges.fold(self.possibly_missing)}"
                f" missing, {self.unidentified} more arrived without a name"
            )
        if self.duplicates:
            parts.append(
                f"ranks {ranges.fold(self.duplicates)} arrived more than once:"
                " the key prefix was used before"
            )
        return "; ".join(parts) or "everybody arrived after all"

    def facts(self) -> dict[str, Any]:
        """Give the fields that events have of it."""
        return {
            "missing": self.described(),
            "arrived_count": self.count,
            "missing_ranks": list(self.missing),
            "missing_names": list(self.missing_names),
            "possibly_missing_ranks": list(self.possibly_missing),
            "unidentified_count": self.unidentified,
        }

    def to_bytes(self) -> bytes:
        """Write it, for the others."""
        return json.dumps(
            {
                "count": self.count,
                "unnamed": ranges.fold(self.unnamed),
                "unidentified": self.unidentified,
                "duplicates": ranges.fold(self.duplicates),
                "names": dict(self.names),
                "traceparent": self.traceparent,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, written: bytes, world_size: int) -> "MissingReport | None":
        """Read it; None where something else stands there."""
        try:
            found = json.loads(written)
            return cls(
                world_size=world_size,
                count=int(found["count"]),
                unnamed=tuple(ranges.unfold(found["unnamed"])),
                unidentified=int(found["unidentified"]),
                duplicates=tuple(ranges.unfold(found["duplicates"])),
                names={int(rank): str(n) for rank, n in found["names"].items()},
                traceparent=str(found.get("traceparent", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
