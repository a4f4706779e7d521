"""Reports a stall: the event, and the gauges while it lasts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tracedstore import names
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.recording.cold_metrics import Labels
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY

# The key of the latest verdict, for the other ranks and for ``tracedstore status``.
VERDICT: Final = "tracedstore/VERDICT"

_MAX_RANKS_NAMED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledJob:
    """A stalled job, as of the last report.

    Attributes:
        cause: Why it is stalled.
        awaited_count: Number of ranks that it waits for, 0 if they are unknown.
        awaited: Host and cause of each of the first 64 of them.
    """

    cause: str
    awaited_count: int
    awaited: Mapping[int, tuple[str, str]]

    @property
    def group(self) -> tuple[str, ...]:
        """A process exports one stall at a time."""
        return ("job",)

    def gauges(self) -> Iterator[tuple[names.Metric, Labels, float]]:
        """Return the values of the gauges."""
        yield names.JOB_AWAITED, (self.cause,), self.awaited_count
        for rank, (host, cause) in list(self.awaited.items())[:_MAX_RANKS_NAMED]:
            yield names.JOB_RANK_AWAITED, (str(rank), host, cause), 1


def report(wait: object, verdict: Verdict, *, emit: bool = True) -> None:
    """Emit `job.stalled` and set the gauges.

    Args:
        wait: The wait that the verdict is about; `resumed` gets the same.
        verdict: The verdict.
        emit: False to set the gauges alone.
    """
    stalled = StalledJob(
        cause=verdict.cause,
        awaited_count=len(verdict.awaited_ranks),
        awaited={one.rank: (one.host, one.cause) for one in verdict.awaited},
    )
    RECORDER.cold.begin(wait, stalled)
    if emit:
        TELEMETRY.emit(names.JOB_STALLED, **verdict.event_fields())


def resumed(wait: object, verdict: Verdict) -> None:
    """Emit `job.resumed` and clear the gauges, if the stall was reported."""
    if RECORDER.cold.end(wait):
        TELEMETRY.emit(names.JOB_RESUMED, **verdict.event_fields())


def failed(wait: object) -> None:
    """Clear the gauges of a wait that ended with an exception."""
    RECORDER.cold.end(wait)
