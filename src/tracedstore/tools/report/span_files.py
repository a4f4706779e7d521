"""Converts spans of barrier calls to log events.

Reads the JSON of OpenTelemetry's SDK and the JSON of OTLP. Trace and span ids are not
read: their encoding (hex or base64) depends on the writer.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from tracedstore import names
from tracedstore.tools.report.event_fields import INVALID, timestamp

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


def event_from_span(span: dict[str, Any]) -> dict[str, Any] | None:
    """Return the event of a barrier call's span in the SDK's JSON.

    Returns None for any other object, and for a span with invalid times or status.
    """
    attributes = span.get("attributes")
    if not isinstance(attributes, dict) or names.BARRIER_PREFIX not in attributes:
        return None
    resource = span.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("attributes"), dict):
        attributes = {**resource["attributes"], **attributes}
    try:
        result = attributes[names.BARRIER_RESULT]
        waited = timestamp(span["end_time"]) - timestamp(span["start_time"])
        event = {
            "event": _EVENTS[result],
            "timestamp": span["end_time"],
            "waited_seconds": max(0.0, waited),
            # The name of the span is "barrier <family>".
            "barrier_family": _text(span["name"]).partition(" ")[2],
            "error": span["status"].get("description", ""),
        }
    except (*INVALID, AttributeError):
        return None
    for attribute, name in _FIELDS.items():
        if attribute in attributes:
            event[name] = attributes[attribute]
    return event


def events_from_resource_spans(
    resource_spans: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield the events of all valid barrier spans in an OTLP ``ResourceSpans``."""
    resource = _attributes(resource_spans.get("resource"))
    for scope in _objects(resource_spans["scopeSpans"]):
        for span in _objects(scope.get("spans")):
            try:
                event = event_from_span(
                    {
                        "name": span["name"],
                        "start_time": _seconds(span["startTimeUnixNano"]),
                        "end_time": _seconds(span["endTimeUnixNano"]),
                        "status": {"description": _status_message(span)},
                        "attributes": _attributes(span),
                        "resource": {"attributes": resource},
                    }
                )
            except INVALID:
                continue
            if event is not None:
                yield event


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _seconds(nanoseconds: object) -> float:
    # OTLP's JSON writes 64-bit integers as strings.
    if type(nanoseconds) is not int:
        nanoseconds = int(_text(nanoseconds))
    # Microseconds are the precision of the SDK's JSON.
    return round(nanoseconds / 1e9, 6)


def _text(value: object) -> str:
    # str() of a deeply nested value exceeds the recursion limit.
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _status_message(span: dict[str, Any]) -> str:
    status = span.get("status")
    return _text(status.get("message", "")) if isinstance(status, dict) else ""


def _attributes(holder: object) -> dict[str, Any]:
    if not isinstance(holder, dict):
        return {}
    return {
        attribute["key"]: _value(attribute.get("value"))
        for attribute in _objects(holder.get("attributes"))
        if isinstance(attribute.get("key"), str)
    }


def _value(any_value: object) -> Any:
    """Return the content of an OTLP ``AnyValue``: an object with one typed field."""
    if not isinstance(any_value, dict) or len(any_value) != 1:
        return None
    ((kind, value),) = any_value.items()
    if kind == "arrayValue":
        items = value.get("values") if isinstance(value, dict) else None
        return [_value(item) for item in _objects(items)]
    if kind == "intValue" and isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return value
