"""Reads events from log files, and counts the lines that contain none."""

import gzip
import io
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from tracedstore.tools.report.log_formats import (
    MAX_LINE_BYTES,
    ContainerLogUnwrapper,
    ParsedLine,
    may_have_event,
    may_have_span,
    parse_bare_event,
)

STANDARD_INPUT: Final = "-"

# Seconds without input from a pipe, after which on_wait is called.
_PIPE_TIMEOUT = 2.0
_PAGE_START = b"<!DOCTYPE html>"
_GZIP_MAGIC = b"\x1f\x8b"
# The first and the last line of indented JSON.
_INDENTED_JSON_ENDS: Final = {b"{": b"}", b"[": b"]"}

AddEvent = Callable[[dict[str, Any]], bool]


class OutputError(Exception):
    """The output file is one of the input files."""


@dataclass(slots=True)
class ReadStats:
    """Counts of what was read.

    Attributes:
        files: Files that were opened.
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
        paths: Files, directories, or "-" for standard input.
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
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
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


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PAGE_START)) == _PAGE_START


def read_events(
    files: Iterable[str],
    add: AddEvent,
    stats: ReadStats,
    on_wait: Callable[[str], None] = lambda _: None,
) -> None:
    """Read all events, and all barrier spans as events.

    A file that cannot be read to the end is added to ``stats.incomplete_files``.

    Args:
        files: Names of files; "-" for standard input.
        add: Called with each event; returns whether the event is valid.
        stats: Updated with the counts.
        on_wait: Called with the name of a pipe without input, after two seconds.
    """
    for name in files:
        try:
            with _open(name, on_wait) as file:
                stats.files += 1
                _read_file(file, add, stats)
        except (OSError, EOFError, zlib.error) as error:
            # EOFError: a killed process leaves an incomplete gzip file.
            reason = getattr(error, "strerror", None) or str(error)
            stats.incomplete_files.append(f"{name}: {reason}")


@contextmanager
def _open(name: str, on_wait: Callable[[str], None]) -> Iterator[IO[bytes]]:
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


def _read_file(file: IO[bytes], add: AddEvent, stats: ReadStats) -> None:
    indented = _IndentedJson()
    for line in _lines(file, stats):
        stats.lines += 1
        if may_have_event(line):
            if (event := parse_bare_event(line)) is None:
                _read_line(line, add, stats)
            elif add(event):
                stats.events += 1
            else:
                stats.invalid += 1
            continue
        if may_have_span(line) and b'{"' in line:
            _read_line(line, add, stats)
            continue
        stripped = line.rstrip()
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


def _lines(file: IO[bytes], stats: ReadStats) -> Iterator[bytes]:
    """Yield lines without the wrapping of a container runtime."""
    unwrapper = ContainerLogUnwrapper()
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
        return complete and may_have_span(self.text)


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
