"""Log files to events: whatever else stands in them is counted and passed over."""

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

from tracedstore.report.carried import (
    LONGEST_LINE,
    Found,
    Runtime,
    bare_event,
    has_event,
    has_span,
)

STANDARD_INPUT: Final = "-"

# Seconds after which it is said that a pipe is waited for.
_PATIENCE = 2.0
# What a page begins with.
_PAGE = b"<!DOCTYPE html>"


class OutputError(Exception):
    """What should be written is something to be read."""


@dataclass(slots=True)
class Tally:
    """What was read, and what was not.

    Attributes:
        files: Files that were read.
        lines: Lines in them; one that a container runtime has cut in parts is one.
        events: Events among these.
        spans: Spans of barriers among these.
        broken: Lines with JSON that has no end, or that another writer cut in two.
        unfit: Events that lack a field, or have a wrong one.
        foreign: Lines of anybody else.
        long: Lines beyond 16 MiB.
        damaged: Files that could not be read to their end, and why.
    """

    files: int = 0
    lines: int = 0
    events: int = 0
    spans: int = 0
    broken: int = 0
    unfit: int = 0
    foreign: int = 0
    long: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Lines of which nothing, or not all, was used."""
        return self.broken + self.unfit + self.foreign + self.long


def files_in(places: Iterable[str], but: Path) -> list[str]:
    """List the files that are meant: folders with all below them, each file once.

    Args:
        places: Files, folders, or "-".
        but: A file that is not meant: the report itself, of an earlier time.

    Raises:
        OutputError: That file is one of those that are meant, and no report.
        OSError: Something that was named is not there.
    """
    found: dict[tuple[int, int] | str, str] = {}
    of_report = but.stat() if but.exists() else None
    report = (of_report.st_dev, of_report.st_ino) if of_report else None
    for place in places:
        if place == STANDARD_INPUT:
            found[place] = place
            continue
        path = Path(place)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                told = file.stat()
            except OSError:
                if file == path:
                    raise
                continue
            # A pipe in a folder would be waited for; one that is named is meant.
            if stat.S_ISREG(told.st_mode) or (file == path and not path.is_dir()):
                identity = told.st_dev, told.st_ino
                if identity != report:
                    found.setdefault(identity, str(file))
                elif stat.S_ISREG(told.st_mode) and told.st_size and not _is_page(but):
                    raise OutputError
    return list(found.values())


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PAGE)) == _PAGE


def events_in(
    files: Iterable[str], tally: Tally, waiting: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Give every event, and every span of a barrier as the event it stands for.

    Args:
        files: What to read; "-" for standard input.
        tally: Where it is counted.
        waiting: Is told of a pipe into which nobody writes.
    """
    for name in files:
        try:
            with _opened(name, waiting) as file:
                tally.files += 1
                yield from _events(file, tally)
        except (OSError, EOFError, zlib.error) as error:
            # A rank that was killed leaves half a gzip behind it.
            said = getattr(error, "strerror", None) or str(error)
            tally.damaged.append(f"{name}: {said}")


@contextmanager
def _opened(name: str, waiting: Callable[[str], None]) -> Iterator[IO[bytes]]:
    # Nobody may have opened a pipe to write, and who did may have nothing to say.
    patience = threading.Timer(_PATIENCE, waiting, [name])
    patience.daemon = True
    if name == STANDARD_INPUT or not Path(name).is_file():
        patience.start()
    with ExitStack() as opened:
        try:
            if name == STANDARD_INPUT:
                source = io.FileIO(sys.stdin.fileno(), closefd=False)
            else:
                source = io.FileIO(name)
            file = opened.enter_context(io.BufferedReader(source))
            packed = file.peek(2)[:2] == b"\x1f\x8b"
        finally:
            patience.cancel()
        if packed:
            unpacked = gzip.GzipFile(fileobj=file)
            yield opened.enter_context(io.BufferedReader(unpacked))
        else:
            yield file


def _events(file: IO[bytes], tally: Tally) -> Iterator[dict[str, Any]]:
    spread = _Spread()
    for line in _lines(file, tally):
        tally.lines += 1
        if has_event(line):
            if event := bare_event(line):
                tally.events += 1
                yield event
            else:
                yield from _of_line(line, tally)
            continue
        if has_span(line) and b'{"' in line:
            yield from _of_line(line, tally)
            continue
        tally.foreign += 1
        bare = line.rstrip()
        if whole := spread.joined(bare):
            tally.foreign -= whole.count(b"\n") + 1
            yield from _of_line(whole, tally)
        elif b'{"' in bare and not bare.endswith(b"}"):
            tally.foreign -= 1
            tally.broken += 1


def _lines(file: IO[bytes], tally: Tally) -> Iterator[bytes]:
    """Give lines as they were printed."""
    runtime = Runtime()
    for written in iter(partial(file.readline, LONGEST_LINE), b""):
        if len(written) == LONGEST_LINE and not written.endswith(b"\n"):
            tally.lines += 1
            tally.long += 1
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
        elif (line := runtime.line(written)) is not None:
            yield line
    yield from runtime.rest()


class _Spread:
    """Puts together what is indented, as ConsoleSpanExporter does it by default."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def joined(self, bare: bytes) -> bytes:
        """Take a line; give the object that ends with it, if a span may be in it."""
        if bare == b"{":
            self._held, self._size = [bare], 1
        elif self._held:
            self._held.append(bare)
            self._size += len(bare)
            if bare == b"}":
                whole, self._held = b"\n".join(self._held), []
                return whole if has_span(whole) else b""
            if self._size > LONGEST_LINE:
                self._held = []
        return b""


def _of_line(line: bytes, tally: Tally) -> Iterator[dict[str, Any]]:
    """Give the events of a line, in which others may have written as well."""
    found = Found()
    found.in_line(line.decode("utf-8", "replace"))
    tally.events += len(found.events)
    tally.spans += len(found.spans)
    if not found.whole or not found.objects:
        tally.broken += 1
    elif not (found.events or found.spans):
        tally.foreign += 1
    yield from found.events
    yield from found.spans
