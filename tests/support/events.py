"""Validation of events against their schema."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

from tracedstore import names

SCHEMA: dict[str, Any] = json.loads(
    files("tracedstore.signals").joinpath("events.schema.json").read_text()
)
Events = Callable[[], list[dict[str, Any]]]


def documented_fields(event: str) -> set[str]:
    """Return every field that the schema has for an event."""

    def fields(schema: dict[str, Any]) -> set[str]:
        names = set(schema.get("properties", {}))
        for reference in schema.get("allOf", []):
            names |= fields(SCHEMA["$defs"][reference["$ref"].split("/")[-1]])
        return names

    (branch,) = [branch for branch in SCHEMA["oneOf"] if branch["title"] == event]
    return set(SCHEMA["properties"]) | fields(branch)


def check(event: dict[str, Any]) -> None:
    """Validate one event against the schema, which must also have all its fields."""
    Draft202012Validator(SCHEMA).validate(event)
    assert set(event) <= documented_fields(event["event"])
    assert event["level"] == names.EVENT_LEVELS[event["event"]]
