"""The report of a barrier's missing ranks, with names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from tracedstore import names
from tracedstore.common import codec, ranges, validation
from tracedstore.common.codec import LATER, Kind, Printable, UpTo, WorldSize
from tracedstore.naming import decoders
from tracedstore.recording.cold_metrics import Labels

# A report that names 98,304 missing ranks has 5 MB.
_MAX_REPORT_BYTES = 8 * 1024 * 1024
# Ranks may arrive more than once.
_MAX_COUNT = 2 * ranges.MAX_RANKS


# Ranks whose activity is part of the text; all are in the fields.
_MAX_FINDINGS_IN_TEXT = 4
# Missing ranks that have a gauge.
_MAX_RANKS_NAMED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledBarrier:
    """A barrier that waits, as of the last report.

    Attributes:
        family: The key family of its prefix.
        arrived: Number of ranks that arrived.
        missing: The ranks that did not, each with the name of its host.
        possible: Number of ranks that may be missing, where some arrived without a
            name.
    """

    family: str
    arrived: int
    missing: Mapping[int, str]
    possible: int

    @property
    def group(self) -> tuple[str, ...]:
        """Stalled barriers of one family share their labels: one is exported."""
        return "barrier", self.family

    def gauges(self) -> Iterator[tuple[names.Metric, Labels, float]]:
        """Return the values of the gauges."""
        yield names.BARRIER_ARRIVED, (self.family,), self.arrived
        yield names.BARRIER_MISSING, (self.family,), len(self.missing) + self.possible
        for rank, host in list(self.missing.items())[:_MAX_RANKS_NAMED]:
            yield names.BARRIER_RANK_MISSING, (self.family, str(rank), host), 1


class Finding(NamedTuple):
    """Why a rank does not arrive.

    Attributes:
        cause: One of `diagnosis.verdict.CAUSES`.
        doing: What its process does instead, for people; "" if that is unknown.
        evidence: How this is known, for people.
    """

    cause: str
    doing: str
    evidence: str = ""


def _unfold(value: Any, _ranks: int) -> tuple[int, ...]:
    # Of a world of any size: that of this job is what the reader takes it for.
    return ranges.unfold_all_below(validation.any_text(value), ranges.MAX_RANKS)


def _rank(value: str, _ranks: int) -> int:
    return validation.digits(value.encode("utf-8", "replace"), ranges.MAX_RANKS)


def _finding(value: Any, _ranks: int) -> Finding:
    if type(value) is not list or len(value) != len(Finding._fields):
        raise ValueError("not a finding")
    cause, doing, evidence = value
    return Finding(
        codec.printable_text(cause), codec.words(doing), codec.words(evidence)
    )


_Count = Annotated[int, codec.below(_MAX_COUNT)]
_AllRanks = Annotated[tuple[int, ...], Kind(_unfold, ranges.fold)]
_RankKey = Annotated[int, Kind(_rank, str)]
_Finding = Annotated[Finding, Kind(_finding, list)]


# Finds out why ranks of a store do not arrive; omits ranks it knows nothing about.
Examine = Callable[[Any, Sequence[int], int], Mapping[int, Finding]]


@dataclass(frozen=True, kw_only=True)
class MissingReport:
    """The ranks that arrived at a barrier and those that did not.

    A report is valid until the number of arrivals changes.

    Attributes:
        world_size: The number of ranks that the barrier is for.
        arrived_count: Number of arrivals counted.
        unseen_ranks: Ranks without a recorded arrival, in order. They are missing, or
            among the unidentified arrivals.
        unidentified_count: Arrivals without a rank.
        duplicate_ranks: Ranks that arrived more than once.
        uncounted_ranks: Unseen ranks that recorded an arrival but were not counted:
            they stopped while arriving.
        names: The names of the unseen ranks.
        findings: Why unseen ranks did not arrive, where it is known.
    """

    world_size: WorldSize
    arrived_count: _Count
    unseen_ranks: _AllRanks
    unidentified_count: _Count
    duplicate_ranks: _AllRanks
    uncounted_ranks: _AllRanks = ()
    names: Annotated[Mapping[_RankKey, Printable], UpTo(ranges.MAX_RANKS)]
    findings: Annotated[Mapping[_RankKey, _Finding], UpTo(ranges.MAX_RANKS), LATER] = (
        field(default_factory=dict)
    )

    @classmethod
    def unknown(cls, world_size: int) -> "MissingReport":
        """Make the report for a barrier whose arrivals could not be read."""
        return cls(
            world_size=world_size,
            arrived_count=0,
            unseen_ranks=tuple(range(world_size)),
            unidentified_count=world_size,
            duplicate_ranks=(),
            names={},
        )

    def with_names(self, decoder: decoders.Decoder) -> "MissingReport":
        """Return the report with the names that a decoder returns."""
        names = {rank: decoders.name_of(decoder, rank) for rank in self.unseen_ranks}
        return replace(self, names=names)

    def with_findings(self, findings: Mapping[int, Finding]) -> "MissingReport":
        """Return the report with why its ranks did not arrive."""
        return replace(self, findings=findings)

    @property
    def missing_causes(self) -> tuple[str, ...]:
        """The causes of the missing ranks, in the same order; "" where unknown."""
        return tuple(self._finding(rank).cause for rank in self.missing_ranks)

    @property
    def missing_doing(self) -> tuple[str, ...]:
        """What the missing ranks do instead, in the same order; "" where unknown."""
        return tuple(self._finding(rank).doing for rank in self.missing_ranks)

    @property
    def missing_evidence(self) -> tuple[str, ...]:
        """How that is known, in the same order; "" where nothing is."""
        return tuple(self._finding(rank).evidence for rank in self.missing_ranks)

    def _finding(self, rank: int) -> Finding:
        return self.findings.get(rank) or Finding("", "")

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that are certainly missing; none if there are unidentified arrivals."""
        return () if self.unidentified_count else self.unseen_ranks

    @property
    def possibly_missing_ranks(self) -> tuple[int, ...]:
        """The unseen ranks, if there are unidentified arrivals."""
        return self.unseen_ranks if self.unidentified_count else ()

    @property
    def missing_count(self) -> int:
        """The number of missing ranks, identified or not."""
        return max(0, len(self.unseen_ranks) - self.unidentified_count)

    @property
    def arrived_ranks(self) -> tuple[int, ...]:
        """Ranks with a recorded arrival."""
        # From the gaps between the unseen ranks, which are few.
        arrived: list[int] = []
        after = 0
        for rank in self.unseen_ranks:
            arrived += range(after, rank)
            after = rank + 1
        return (*arrived, *range(after, self.world_size))

    @property
    def missing_names(self) -> tuple[str, ...]:
        """The names of the missing ranks, in the same order."""
        return tuple(self._name(rank) for rank in self.missing_ranks)

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or decoders.default_name(rank)

    def describe(self) -> str:
        """Describe the report in one line, for the operator."""
        parts = []
        if self.missing_ranks:
            parts.append(
                decoders.describe_missing(
                    self.missing_ranks, self.world_size, self._name
                )
            )
            found = [rank for rank in self.missing_ranks if self._finding(rank).doing]
            parts += [
                f"rank {rank}: {self._finding(rank).doing}"
                for rank in found[:_MAX_FINDINGS_IN_TEXT]
            ]
        elif self.arrived_count == 0:
            parts.append("the missing ranks could not be determined")
        elif self.possibly_missing_ranks:
            parts.append(
                f"{self.missing_count} of ranks"
                f" {ranges.fold(self.possibly_missing_ranks)} missing,"
                f" {self.unidentified_count} arrivals unidentified"
            )
        if self.uncounted_ranks:
            parts.append(
                f"{ranges.ranks_text(self.uncounted_ranks)} stopped while arriving:"
                " recorded, but not counted"
            )
        if self.duplicate_ranks:
            parts.append(
                f"{ranges.ranks_text(self.duplicate_ranks)} arrived more than once:"
                " the key prefix was used before"
            )
        return "; ".join(parts) or "all ranks have arrived"

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of `barrier.waiting` and `barrier.timeout` events."""
        return {
            "missing": self.describe(),
            "arrived_count": self.arrived_count,
            "missing_ranks": list(self.missing_ranks),
            "missing_names": list(self.missing_names),
            "missing_causes": list(self.missing_causes),
            "missing_doing": list(self.missing_doing),
            "missing_evidence": list(self.missing_evidence),
            "possibly_missing_ranks": list(self.possibly_missing_ranks),
            "unidentified_count": self.unidentified_count,
        }

    def to_bytes(self) -> bytes:
        """Encode the report for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(cls, value: bytes, world_size: int) -> "MissingReport | None":
        """Decode a report; None if the value is malformed or too large."""
        return codec.decode(cls, value, _MAX_REPORT_BYTES, world_size)
