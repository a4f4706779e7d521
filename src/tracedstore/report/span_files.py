"""A barrier's span to the event it is.

As OpenTelemetry's SDK writes it in JSON, or in OTLP's JSON, as collectors have it. Ids
are not looked at, so it does not matter whether they are in hex or in base64.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from tracedstore import names
from tracedstore.report.values import UNFIT, moment

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
    names.BARRIER_ARRIVAL_ORDER: "arrival_order",
    names.BARRIER_LAST_RANK: "last_rank",
    names.BARRIER_ARRIVED_COUNT: "arrived_count",
    names.BARRIER_MISSING_RANKS: "missing_ranks",
    names.BARRIER_MISSING_TEXT: "missing",
    "error.type": "error_type",
}
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


def as_event(span: dict[str, Any]) -> dict[str, Any] | None:
    """Give the event that a span of a barrier stands for; None for anything else."""
    attributes = span.get("attributes")
    if not isinstance(attributes, dict) or names.BARRIER_PREFIX not in attributes:
        return None
    resource = span.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("attributes"), dict):
        attributes = {**resource["attributes"], **attributes}
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


def spans_in(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the events that the spans of a resource, in OTLP's JSON, stand for."""
    resource = _attributes(record.get("resource"))
    for scope in _objects(record["scopeSpans"]):
        for span in _objects(scope.get("spans")):
            try:
                event = as_event(
                    {
                        "name": span["name"],
                        "start_time": _moment(span["startTimeUnixNano"]),
                        "end_time": _moment(span["endTimeUnixNano"]),
                        "status": {"description": _message(span)},
                        "attributes": _attributes(span),
                        "resource": {"attributes": resource},
                    }
                )
            except UNFIT:
                continue
            if event is not None:
                yield event


def _objects(found: object) -> Iterator[dict[str, Any]]:
    if isinstance(found, list):
        yield from (each for each in found if isinstance(each, dict))


def _moment(nanoseconds: object) -> float:
    # To the microsecond, as the SDK writes it.
    return round(int(str(nanoseconds)) / 1e9, 6)


def _message(span: dict[str, Any]) -> str:
    status = span.get("status")
    return str(status.get("message", "")) if isinstance(status, dict) else ""


def _attributes(holder: object) -> dict[str, Any]:
    if not isinstance(holder, dict):
        return {}
    return {
        each["key"]: _value(each.get("value"))
        for each in _objects(holder.get("attributes"))
        if isinstance(each.get("key"), str)
    }


def _value(written: object) -> Any:
    """Read a value of OTLP: its only field says what it is."""
    if not isinstance(written, dict) or len(written) != 1:
        return None
    ((kind, value),) = written.items()
    if kind == "arrayValue":
        listed = value.get("values") if isinstance(value, dict) else None
        return [_value(each) for each in _objects(listed)]
    if kind == "intValue" and isinstance(value, str) and _INTEGER.fullmatch(value):
        # JSON has no integers of 64 bits, so these are texts.
        return int(value)
    return value
