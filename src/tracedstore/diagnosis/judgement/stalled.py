"""Reports a stall: the event, and the gauges while it lasts."""

from typing import Final

from tracedstore import names
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.stall_stats import StalledJob
from tracedstore.recording.telemetry import TELEMETRY

# The key of the latest verdict, for the other ranks and for ``tracedstore status``.
VERDICT: Final = "tracedstore/VERDICT"


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
    RECORDER.stalls.begin(wait, stalled)
    if emit:
        TELEMETRY.emit(names.JOB_STALLED, **verdict.event_fields())


def resumed(wait: object, verdict: Verdict) -> None:
    """Emit `job.resumed` and clear the gauges, if the stall was reported."""
    if RECORDER.stalls.end(wait):
        TELEMETRY.emit(names.JOB_RESUMED, **verdict.event_fields())


def failed(wait: object) -> None:
    """Clear the gauges of a wait that ended with an exception."""
    RECORDER.stalls.end(wait)
