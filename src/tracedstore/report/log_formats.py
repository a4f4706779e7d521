"""An event in whatever carries it: runtimes, collectors and exporters wrap lines.

One rule finds it: in a JSON object that is not an event itself, every object is looked
at in the same way, and every text is a line. What a container runtime puts round a line
is taken off before, because it cuts long ones in parts, which have to be put together.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from tracedstore import names
from tracedstore.report.span_files import as_event, spans_in

# An event that names 100,000 missing ranks has some 3 MB.
LONGEST_LINE: Final = 16 << 20

# Beginnings of objects that are tried in a line where several writers met.
_MOST_TRIES = 16
# Objects, lists and texts in each other; a collector's export of logs has eight.
_DEEPEST = 16
# In a text in a text, quotes have backslashes.
_ONE_OF_OURS = "|".join(map(re.escape, names.EVENT_NAMES))
_EVENT_TEXT = rf'"event\\*": ?\\*"(?:{_ONE_OF_OURS})\\*"'
_EVENT = re.compile(_EVENT_TEXT.encode())
_EVENT_IN_TEXT = re.compile(_EVENT_TEXT)
_SPAN_TEXT = f'"{names.BARRIER_PREFIX}'
_SPAN = _SPAN_TEXT.encode()
_NAMES = frozenset(names.EVENT_NAMES)
# A list of them is taken as a whole: it may have any number.
_OBJECT = re.compile(r'(?:\[\s*)?\{\s*"')

# Docker's json-file, and what the kubelet and podman write: time, stream, and P for a
# part of a line or F for the last of it.
_RUNTIME = re.compile(
    rb'\{"log":"|\d{4}-\d\d-\d\dT\S{8,40} (stdout|stderr) ([PF])(?::\S*)? '
)
# Where Docker cuts a line.
_DOCKER_PART = 16 << 10


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def has_event(line: bytes) -> bool:
    """Tell whether an event may be in a line."""
    return _EVENT.search(line) is not None


def has_span(line: bytes | bytearray) -> bool:
    """Tell whether a barrier's span may be in a line, or in some of them."""
    return _SPAN in line


def _is_ours(event: object) -> bool:
    return type(event) is str and event in _NAMES


def bare_event(line: bytes) -> dict[str, Any] | None:
    """Give the event that a line is, with nothing round it: most are, and this is fast.

    None says nothing: there may be one, or several.
    """
    text = line.decode("utf-8", "replace")
    try:
        told, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if type(told) is dict and _is_ours(told.get("event")) and not text[end:].strip():
        return told
    return None


class Runtime:
    """Takes off what a container runtime put round lines, and joins their parts."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    def line(self, written: bytes) -> bytes | None:
        """Give the line that was printed; None while there is more of it to come."""
        wrapped = _RUNTIME.match(written)
        if wrapped is None:
            return written
        if wrapped[1]:
            stream, text = wrapped[1], written[wrapped.end() :]
            part = wrapped[2] == b"P"
            text = text.rstrip(b"\r\n") if part else text
        else:
            try:
                record = json.loads(written)
                text = record["log"].encode("utf-8", "replace")
                stream = b"stderr" if record.get("stream") == "stderr" else b"stdout"
            except (ValueError, AttributeError, RecursionError):
                return written
            part = len(text) >= _DOCKER_PART and not text.endswith(b"\n")
        held = self._parts.get(stream, b"")
        if part and len(held) + len(text) < LONGEST_LINE:
            self._parts.setdefault(stream, bytearray()).extend(text)
            return None
        self._parts.pop(stream, None)
        return b"".join((held, text))

    def rest(self) -> list[bytes]:
        """Give the lines of which the end did not come."""
        return [bytes(held) for held in self._parts.values()]


@dataclass(slots=True)
class Found:
    """What is in a line.

    Attributes:
        events: Events of ours.
        spans: Spans of barriers, as the events they stand for.
        objects: JSON objects, and lists of them, of anybody.
        whole: None of them is cut off, and all were looked at.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    objects: int = 0
    whole: bool = True

    def in_line(self, text: str, depth: int = 0) -> None:
        """Look into a line, in which others may have written as well."""
        position = 0
        for _ in range(_MOST_TRIES):
            begin = _OBJECT.search(text, position)
            if begin is None:
                break
            try:
                told, position = _decoder.raw_decode(text, begin.start())
            except (ValueError, RecursionError):
                self.whole = False
                position = begin.start() + 1
                continue
            self.objects += 1
            self._in_value(told, depth)
        else:
            self.whole = self.whole and _OBJECT.search(text, position) is None

    def _in_value(self, told: Any, depth: int) -> None:
        if isinstance(told, str):
            if _EVENT_IN_TEXT.search(told) or _SPAN_TEXT in told:
                self.in_line(told, depth + 1)
        elif isinstance(told, dict):
            if _is_ours(told.get("event")):
                self.events.append(told)
            elif "scopeSpans" in told:
                self.spans += spans_in(told)
            elif (span := as_event(told)) is not None:
                self.spans.append(span)
            else:
                self._in_all(told.values(), depth)
        elif isinstance(told, list):
            self._in_all(told, depth)

    def _in_all(self, values: Any, depth: int) -> None:
        if depth < _DEEPEST:
            for value in values:
                self._in_value(value, depth + 1)
