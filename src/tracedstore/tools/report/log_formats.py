"""Finds events in log lines, including lines that other software has wrapped.

A JSON object that is not an event is searched recursively: its objects and lists are
searched, and its strings are parsed as lines. The wrapping of container runtimes is
removed before, because they split long lines into parts, which have to be joined first.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tracedstore import names
from tracedstore.tools.report.span_files import (
    event_from_span,
    events_from_resource_spans,
)

# An event that names 100,000 missing ranks has about 3 MB.
MAX_LINE_BYTES: Final = 16 << 20

# Positions at which a JSON value is tried in a line that several processes wrote to.
_MAX_VALUES = 16
# Nested objects, lists and strings; the log export of a collector has eight levels.
_MAX_DEPTH = 16
_EVENT_NAMES = frozenset(names.EVENT_NAMES)
_EVENT_NAME_PATTERN = "|".join(map(re.escape, names.EVENT_NAMES))
# Quotes have backslashes in a JSON string that is nested in a JSON string.
_EVENT_PATTERN = rf'"event\\*": ?\\*"(?:{_EVENT_NAME_PATTERN})\\*"'
_EVENT_IN_BYTES = re.compile(_EVENT_PATTERN.encode())
_EVENT_IN_TEXT = re.compile(_EVENT_PATTERN)
_SPAN_MARK = f'"{names.BARRIER_PREFIX}'
_SPAN_MARK_BYTES = _SPAN_MARK.encode()
# A list of objects counts as one value, so that it may have any length.
_VALUE_START = re.compile(r'(?:\[\s*)?\{\s*"')

# Docker's json-file driver; and the CRI format of the kubelet and podman: time, stream,
# and P for a part of a line or F for its last part.
_CONTAINER_LINE = re.compile(
    rb'\{"log":"|\d{4}-\d\d-\d\dT\S{8,40} (stdout|stderr) ([PF])(?::\S*)? '
)
# Docker splits lines after this many bytes.
_DOCKER_PART_BYTES = 16 << 10


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_reject_constant)


def may_have_event(line: bytes) -> bool:
    """Return whether a line contains the name of an event."""
    return _EVENT_IN_BYTES.search(line) is not None


def may_have_span(text: bytes | bytearray) -> bool:
    """Return whether a text contains the attribute of a barrier span."""
    return _SPAN_MARK_BYTES in text


def _is_event_name(value: object) -> bool:
    return type(value) is str and value in _EVENT_NAMES


def parse_bare_event(line: bytes) -> dict[str, Any] | None:
    """Return the event if it is all that a line contains, as in most logs.

    This is the fast path. After None, the line has to be parsed with ParsedLine.
    """
    text = line.decode("utf-8", "replace")
    try:
        value, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if (
        type(value) is dict
        and _is_event_name(value.get("event"))
        and not text[end:].strip()
    ):
        return value
    return None


class ContainerLogUnwrapper:
    """Removes the wrapping of a container runtime, and joins the parts of a line."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    def unwrap(self, raw: bytes) -> bytes | None:
        """Return the line as printed; None for a part that is not the last one.

        A line without wrapping is returned as it is.
        """
        header = _CONTAINER_LINE.match(raw)
        if header is None:
            return raw
        if header[1]:
            stream, text = header[1], raw[header.end() :]
            is_part = header[2] == b"P"
            text = text.rstrip(b"\r\n") if is_part else text
        else:
            try:
                record = json.loads(raw)
                text = record["log"].encode("utf-8", "replace")
                stream = b"stderr" if record.get("stream") == "stderr" else b"stdout"
            except (ValueError, AttributeError, RecursionError):
                return raw
            is_part = len(text) >= _DOCKER_PART_BYTES and not text.endswith(b"\n")
        parts = self._parts.get(stream, b"")
        if is_part and len(parts) + len(text) < MAX_LINE_BYTES:
            self._parts.setdefault(stream, bytearray()).extend(text)
            return None
        self._parts.pop(stream, None)
        return b"".join((parts, text))

    def flush(self) -> list[bytes]:
        """Return the lines whose last part is missing."""
        return [bytes(parts) for parts in self._parts.values()]


@dataclass(slots=True)
class ParsedLine:
    """The events and spans of one line.

    Attributes:
        events: Events of tracedstore.
        spans: The events of barrier spans.
        value_count: Number of JSON objects and lists in the line.
        complete: Whether all of these could be parsed.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    value_count: int = 0
    complete: bool = True

    def parse(self, text: str, depth: int = 0) -> None:
        """Parse a line, which may contain other text and output of other processes."""
        position = 0
        for _ in range(_MAX_VALUES):
            start = _VALUE_START.search(text, position)
            if start is None:
                break
            try:
                value, position = _decoder.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                self.complete = False
                position = start.start() + 1
                continue
            self.value_count += 1
            self._search(value, depth)
        else:
            unread = _VALUE_START.search(text, position) is not None
            self.complete = self.complete and not unread

    def _search(self, value: Any, depth: int) -> None:
        if isinstance(value, str):
            if _EVENT_IN_TEXT.search(value) or _SPAN_MARK in value:
                self.parse(value, depth + 1)
        elif isinstance(value, dict):
            if _is_event_name(value.get("event")):
                self.events.append(value)
            elif "scopeSpans" in value:
                self.spans += events_from_resource_spans(value)
            elif (event := event_from_span(value)) is not None:
                self.spans.append(event)
            else:
                self._search_all(value.values(), depth)
        elif isinstance(value, list):
            self._search_all(value, depth)

    def _search_all(self, items: Iterable[Any], depth: int) -> None:
        if depth < _MAX_DEPTH:
            for item in items:
                self._search(item, depth + 1)
