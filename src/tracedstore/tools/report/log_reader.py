"""Reads the events of log files, and passes on the lines that contain none.

Other software wraps lines. The wrapping of container runtimes is removed first, because
they split long lines into parts, which have to be joined. Then a JSON object that is
not an event is searched recursively: its objects and lists are searched, and its
strings are parsed as lines. A span of a barrier call counts as the event of that call.
"""

import glob
import gzip
import io
import json
import re
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from tracedstore import names
from tracedstore.tools.report import flight_dumps
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.logged_events import INVALID, parse_timestamp
from tracedstore.tools.report.output_reader import OutputReader

STANDARD_INPUT: Final = "-"

# Seconds without input from a pipe, after which on_wait is called.
_PIPE_TIMEOUT = 2.0
_PAGE_START = b"<!DOCTYPE html>"
_GZIP_MAGIC = b"\x1f\x8b"
# The first and the last line of indented JSON.
_INDENTED_JSON_ENDS: Final = {b"{": b"}", b"[": b"]"}

AddEvent = Callable[[dict[str, Any]], bool]

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
_MAX_TIME_LENGTH = 40

_EVENT_OF_RESULT: Final = {
    "completed": names.BARRIER_COMPLETED,
    "timeout": names.BARRIER_TIMEOUT,
    "failed": names.BARRIER_FAILED,
}
_FIELD_OF_ATTRIBUTE: Final = {
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


class OutputError(Exception):
    """The output file is one of the input files."""


@dataclass(slots=True)
class ReadStats:
    """Counts of what was read.

    Attributes:
        files: Files that were opened.
        dumps: Dumps of Flight Recorder among them.
        lines: Lines in them. A line that a container runtime has split counts once.
        events: Valid events. A line may contain several.
        spans: Valid barrier spans. A span may have many lines, or a line many spans.
        truncated: Lines with incomplete JSON: cut off, or interleaved with another
            line. Complete objects in such a line are used.
        invalid: Events and spans with an invalid field or without a required one. They
            are not counted in ``events`` and ``spans``.
        unrelated: Lines without an event or a barrier span.
        too_long: Lines of 16 MiB and more.
        incomplete_files: Files that could not be read to the end, with the reason.
    """

    files: int = 0
    dumps: int = 0
    lines: int = 0
    events: int = 0
    spans: int = 0
    truncated: int = 0
    invalid: int = 0
    unrelated: int = 0
    too_long: int = 0
    incomplete_files: list[str] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """Lines, events and spans that could not be used."""
        return self.truncated + self.invalid + self.too_long

    @property
    def skipped(self) -> int:
        """Lines that were not used, or not completely."""
        return self.damaged + self.unrelated


def find_files(paths: Iterable[str], output: Path) -> list[str]:
    """List the input files: directories recursively, every file once.

    Args:
        paths: Files, directories, "-" for standard input, or what is before the rank
            in the names of dumps, as TORCH_FR_DUMP_TEMP_FILE has it.
        output: The file that the report is written to. It is left out if it contains
            an earlier report or nothing.

    Raises:
        OutputError: The output is one of the input files, and contains no report.
        OSError: A path cannot be read.
    """
    files: dict[tuple[int, int] | str, str] = {}
    output_stat = output.stat() if output.exists() else None
    output_id = (output_stat.st_dev, output_stat.st_ino) if output_stat else None
    for name in paths:
        if name == STANDARD_INPUT:
            files[name] = name
            continue
        path = Path(name)
        for file in _files_of(path):
            try:
                status = file.stat()
            except OSError:
                if file == path:
                    raise
                continue
            regular = stat.S_ISREG(status.st_mode)
            # Pipes are read only if they are named: opening one in a directory blocks.
            if regular or (file == path and not path.is_dir()):
                file_id = status.st_dev, status.st_ino
                if file_id != output_id:
                    files.setdefault(file_id, str(file))
                elif regular and status.st_size and not _is_page(output):
                    raise OutputError
    return list(files.values())


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*"))
    if not path.exists() and path.name:
        dumps = path.parent.glob(f"{glob.escape(path.name)}[0-9]*")
        of_ranks = (one for one in dumps if one.name[len(path.name) :].isdecimal())
        return sorted(of_ranks) or [path]
    return [path]


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PAGE_START)) == _PAGE_START


def read_events(
    files: Iterable[str],
    add: AddEvent,
    stats: ReadStats,
    on_wait: Callable[[str], None] = lambda _: None,
    output: JobOutput | None = None,
) -> None:
    """Read all events, all barrier spans as events, and the other output.

    A file that cannot be read to the end is added to ``stats.incomplete_files``.

    Args:
        files: Names of files; "-" for standard input.
        add: Called with each event; returns whether the event is valid.
        stats: Updated with the counts.
        on_wait: Called with the name of a pipe without input, after two seconds.
        output: Updated with what the files contain besides events.
    """
    output = output or JobOutput()
    for number, name in enumerate(files):
        try:
            with _open(name, on_wait) as file:
                stats.files += 1
                written = _last_write(name)
                output.last_write = max(output.last_write, written)
                if file.peek(1)[:1] == flight_dumps.PICKLE_START:
                    data = file.read(flight_dumps.MAX_BYTES + 1)
                    output.add_dump(flight_dumps.read_dump(name, data, written))
                    stats.dumps += 1
                    continue
                reader = OutputReader(output, name, number, written)
                _read_file(file, add, stats, reader)
        except ValueError as error:
            stats.incomplete_files.append(f"{name}: {error}")
        except (OSError, EOFError, zlib.error) as error:
            # EOFError: a killed process leaves an incomplete gzip file.
            reason = getattr(error, "strerror", None) or str(error)
            stats.incomplete_files.append(f"{name}: {reason}")
    output.read_at = time.time()


def _last_write(name: str) -> float:
    """Return when a file was last written; a pipe is written now."""
    path = Path(name)
    if name != STANDARD_INPUT and path.is_file():
        return path.stat().st_mtime
    return time.time()


@contextmanager
def _open(
    name: str, on_wait: Callable[[str], None]
) -> "Iterator[io.BufferedReader[Any]]":
    # Opening a pipe blocks until it has a writer, and peek() until it has data.
    timer = threading.Timer(_PIPE_TIMEOUT, on_wait, [name])
    timer.daemon = True
    if name == STANDARD_INPUT or not Path(name).is_file():
        timer.start()
    with ExitStack() as opened:
        try:
            if name == STANDARD_INPUT:
                raw = io.FileIO(sys.stdin.fileno(), closefd=False)
            else:
                raw = io.FileIO(name)
            file = opened.enter_context(io.BufferedReader(raw))
            is_gzip = file.peek(2)[:2] == _GZIP_MAGIC
        finally:
            timer.cancel()
        if is_gzip:
            unpacked = gzip.GzipFile(fileobj=file)
            yield opened.enter_context(io.BufferedReader(unpacked))
        else:
            yield file


def _read_file(
    file: IO[bytes], add: AddEvent, stats: ReadStats, output: OutputReader
) -> None:
    indented = _IndentedJson()
    unwrapper = ContainerLogUnwrapper()
    for line in _lines(file, stats, unwrapper):
        stats.lines += 1
        if _EVENT_IN_BYTES.search(line):
            if (event := parse_bare_event(line)) is None:
                _read_line(line, add, stats)
            elif add(event):
                stats.events += 1
            else:
                stats.invalid += 1
            continue
        if _SPAN_MARK_BYTES in line and b'{"' in line:
            _read_line(line, add, stats)
            continue
        stripped = line.rstrip()
        output.add(stripped, unwrapper.time)
        truncated = _is_truncated(stripped)
        stats.truncated += truncated
        stats.unrelated += not truncated
        if indented.add(stripped, truncated=truncated):
            # Its lines are already counted one by one; count it once instead.
            stats.truncated -= indented.truncated
            stats.unrelated -= indented.lines - indented.truncated
            _read_line(bytes(indented.text), add, stats)


def _is_truncated(line: bytes) -> bool:
    """Return whether a JSON object starts in a line and does not end there."""
    return (
        b'{"' in line
        and not line.endswith(b"}")
        and line.count(b"{") > line.count(b"}")
    )


def _lines(
    file: IO[bytes], stats: ReadStats, unwrapper: "ContainerLogUnwrapper"
) -> Iterator[bytes]:
    """Yield lines without the wrapping of a container runtime."""
    for raw in iter(partial(file.readline, MAX_LINE_BYTES), b""):
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            stats.lines += 1
            stats.too_long += 1
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
        elif (line := unwrapper.unwrap(raw)) is not None:
            yield line
    yield from unwrapper.flush()


class _IndentedJson:
    """Collects the lines of indented JSON, the default of ConsoleSpanExporter.

    Attributes:
        text: The lines collected so far.
        lines: Number of lines.
        truncated: Number of lines that are incomplete JSON by themselves.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        self.lines = self.truncated = 0
        self._last_line = b""

    def add(self, line: bytes, *, truncated: bool) -> bool:
        """Add a line. Return whether it completes JSON that may contain a span."""
        if last_line := _INDENTED_JSON_ENDS.get(line):
            self.text, self.lines, self.truncated = bytearray(), 0, 0
            self._last_line = last_line
        elif not self._last_line:
            return False
        self.text += line + b"\n"
        self.lines += 1
        self.truncated += truncated
        complete = line == self._last_line
        if complete or len(self.text) > MAX_LINE_BYTES:
            self._last_line = b""
        return complete and _SPAN_MARK_BYTES in self.text


def _read_line(line: bytes, add: AddEvent, stats: ReadStats) -> None:
    """Read the events of a line that may contain other text."""
    parsed = ParsedLine()
    parsed.parse(line.decode("utf-8", "replace"))
    events, spans = (sum(map(add, each)) for each in (parsed.events, parsed.spans))
    stats.events += events
    stats.spans += spans
    stats.invalid += len(parsed.events) + len(parsed.spans) - events - spans
    if not parsed.complete or not parsed.value_count:
        stats.truncated += 1
    elif not (parsed.events or parsed.spans):
        stats.unrelated += 1


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_reject_constant)


def parse_bare_event(line: bytes) -> dict[str, Any] | None:
    """Return the event if it is all that a line contains, as in most logs.

    This is the fast path. After None, the line has to be parsed with ParsedLine.
    """
    text = line.decode("utf-8", "replace")
    try:
        value, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if type(value) is dict and _is_event(value) and not text[end:].strip():
        return value
    return None


def _is_event(value: dict[str, Any]) -> bool:
    name = value.get("event")
    return type(name) is str and name in _EVENT_NAMES


class ContainerLogUnwrapper:
    """Removes the wrapping of a container runtime, and joins the parts of a line.

    Attributes:
        time: The time that the runtime wrote to the last line, "" without one.
    """

    def __init__(self) -> None:
        self.time = ""
        self._parts: dict[bytes, bytearray] = {}

    def unwrap(self, raw: bytes) -> bytes | None:
        """Return the line as printed; None for a part that is not the last one.

        A line without wrapping is returned as it is.
        """
        header = _CONTAINER_LINE.match(raw)
        self.time = ""
        if header is None:
            return raw
        if header[1]:
            self.time = raw[: header.start(1)].decode("utf-8", "replace")
            stream, text = header[1], raw[header.end() :]
            is_part = header[2] == b"P"
            text = text.rstrip(b"\r\n") if is_part else text
        else:
            try:
                record = json.loads(raw)
                text = record["log"].encode("utf-8", "replace")
                time_text = record.get("time")
                if isinstance(time_text, str):
                    self.time = time_text[:_MAX_TIME_LENGTH]
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
            if _is_event(value):
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


def event_from_span(span: dict[str, Any]) -> dict[str, Any] | None:
    """Return the event of a barrier call's span in the SDK's JSON.

    Returns None for any other object, and for a span with invalid times or status.
    """
    attributes = span.get("attributes")
    if not isinstance(attributes, dict) or names.BARRIER_PREFIX not in attributes:
        return None
    if names.BARRIER_ROOT in attributes:  # of no rank
        return None
    resource = span.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("attributes"), dict):
        attributes = {**resource["attributes"], **attributes}
    try:
        result = attributes[names.BARRIER_RESULT]
        waited = parse_timestamp(span["end_time"]) - parse_timestamp(span["start_time"])
        event = {
            "event": _EVENT_OF_RESULT[result],
            "timestamp": span["end_time"],
            "waited_seconds": max(0.0, waited),
            # The name of the span is "barrier <family>".
            "barrier_family": _text(span["name"]).partition(" ")[2],
            "error": span["status"].get("description", ""),
        }
    except (*INVALID, AttributeError):
        return None
    for attribute, name in _FIELD_OF_ATTRIBUTE.items():
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
