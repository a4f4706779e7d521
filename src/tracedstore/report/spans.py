"""A barrier's span, as OpenTelemetry's SDK writes it in JSON, to the event it is."""

from typing import Any, Final

from tracedstore.report.values import moment
from tracedstore.signals import names

_EVENTS: Final = {
    "completed": names.BARRIER_COMPLETED,
    "timeout": names.BARRIER_TIMEOUT,
    "failed": names.BARRIER_FAILED,
}
_FIELDS: Final = {
    names.BARRIER_PREFIX: "barrier",
    names.RANK: "rank",
    names.LOCAL_RANK: "local_rank",
    names.WORLD_SIZE: "world_size",
    names.RUN_ID: "run_id",
    names.HOST_NAME: "host",
    names.BARRIER_PLACE: "place",
    names.BARRIER_LAST_RANK: "last_rank",
    names.BARRIER_ARRIVED_COUNT: "arrived_count",
    names.BARRIER_MISSING_RANKS: "missing_ranks",
    names.BARRIER_MISSING_TEXT: "missing",
    "error.type": "error_type",
}


def as_event(span: dict[str, Any]) -> dict[str, Any] | None:
    """Give the event that a span of a barrier stands for; None for anything else."""
    attributes = span.get("attributes")
    if not isinstance(attributes, dict) or names.BARRIER_PREFIX not in attributes:
        return None
    try:
        result = attributes[names.BARRIER_RESULT]
        waited = moment(span["end_time"]) - moment(span["start_time"])
        event = {
            "event": _EVENTS[result],
            "timestamp": span["end_time"],
            "waited_seconds": max(0.0, waited),
            # Its name is "barrier" and the family.
            "barrier_family": str(span["name"]).partition(" ")[2],
            "error": span["status"].get("description", ""),
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    for attribute, name in _FIELDS.items():
        if attribute in attributes:
            event[name] = attributes[attribute]
    return event
