"""Hold events against their schema."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

from tracedstore.signals.events import LEVELS

SCHEMA: dict[str, Any] = json.loads(
    files("tracedstore.signals").joinpath("events.schema.json").read_text()
)
Events = Callable[[], list[dict[str, Any]]]


def documented_fields(event: str) -> set[str]:
    """Every field that the schema has for an event."""

    def fields(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        for reference in schema.get("allOf", []):
            found |= fields(SCHEMA["$defs"][reference["$ref"].split("/")[-1]])
        return found

    (own,) = [branch for branch in SCHEMA["oneOf"] if branch["title"] == event]
    return set(SCHEMA["properties"]) | fields(own)


def check(event: dict[str, Any]) -> None:
    """Hold one event against the schema, which also has to name all its fields."""
    Draft202012Validator(SCHEMA).validate(event)
    assert set(event) <= documented_fields(event["event"])
    assert event["level"] == LEVELS[event["event"]]
