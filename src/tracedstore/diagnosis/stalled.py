"""The one way out for a verdict: events when a job stalls and when it goes on."""

from typing import Final

from tracedstore import names
from tracedstore.core.telemetry import TELEMETRY
from tracedstore.diagnosis.verdict import Verdict

# The key of the verdict that the diagnosing rank publishes for the others.
VERDICT: Final = "tracedstore/VERDICT"


def report(verdict: Verdict) -> None:
    """Emit `job.stalled`."""
    TELEMETRY.emit(names.JOB_STALLED, **verdict.event_fields())


def resumed(verdict: Verdict) -> None:
    """Emit `job.resumed`, after `report`."""
    TELEMETRY.emit(names.JOB_RESUMED, **verdict.event_fields())
