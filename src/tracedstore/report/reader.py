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

from tracedstore.report.log_formats import (
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
# What is indented begins with a line like this, and ends with one like that.
_ENDS: Final = {b"{": b"}", b"[": b"]"}

Take = Callable[[dict[str, Any]], bool]


class OutputError(Exception):
    """What should be written is something to be read."""


@dataclass(slots=True)
class ReadStats:
    """What was read, and what was not.

    Attributes:
        files: Files that were read.
        lines: Lines in them; one that a container runtime has cut in parts is one.
        events: Events in these; a line may have several.
        spans: Spans of barriers in these; one may have many lines, or a line many.
        broken: Lines with JSON that has no end, or that another writer cut in two. The
            rest of such a line is used.
        unfit: Events and spans that lack a field, or have a wrong one; not among those
            above.
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
    def useless(self) -> int:
        """What was meant for us, as it seems, and could not be used."""
        return self.broken + self.unfit + self.long

    @property
    def skipped(self) -> int:
        """Lines of which nothing, or not all, was used."""
        return self.useless + self.foreign


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


def read_events(
    files: Iterable[str],
    take: Take,
    stats: ReadStats,
    waiting: Callable[[str], None] = lambda _: None,
) -> None:
    """Read every event, and every span of a barrier as the event it stands for.

    Args:
        files: What to read; "-" for standard input.
        take: Is given each, and says whether it is fit.
        stats: Where it is counted.
        waiting: Is told of a pipe into which nobody writes.
    """
    for name in files:
        try:
            with _opened(name, waiting) as file:
                stats.files += 1
                _read(file, take, stats)
        except (OSError, EOFError, zlib.error) as error:
            # A rank that was killed leaves half a gzip behind it.
            said = getattr(error, "strerror", None) or str(error)
            stats.damaged.append(f"{name}: {said}")


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


def _read(file: IO[bytes], take: Take, stats: ReadStats) -> None:
    spread = _Spread()
    for line in _lines(file, stats):
        stats.lines += 1
        if has_event(line):
            if (event := bare_event(line)) is None:
                _read_line(line, take, stats)
            elif take(event):
                stats.events += 1
            else:
                stats.unfit += 1
            continue
        if has_span(line) and b'{"' in line:
            _read_line(line, take, stats)
            continue
        bare = line.rstrip()
        torn = _is_torn(bare)
        stats.broken += torn
        stats.foreign += not torn
        if spread.ends_with(bare, torn=torn):
            stats.broken -= spread.torn
            stats.foreign -= spread.lines - spread.torn
            _read_line(bytes(spread.held), take, stats)


def _is_torn(bare: bytes) -> bool:
    """Tell whether an object begins there that may be ours, and is cut off."""
    return (
        b'{"' in bare
        and not bare.endswith(b"}")
        and bare.count(b"{") > bare.count(b"}")
    )


def _lines(file: IO[bytes], stats: ReadStats) -> Iterator[bytes]:
    """Give lines as they were printed."""
    runtime = Runtime()
    for written in iter(partial(file.readline, LONGEST_LINE), b""):
        if len(written) == LONGEST_LINE and not written.endswith(b"\n"):
            stats.lines += 1
            stats.long += 1
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
        elif (line := runtime.line(written)) is not None:
            yield line
    yield from runtime.rest()


class _Spread:
    """Puts together what is indented, as ConsoleSpanExporter does it by default.

    Attributes:
        held: An object, or a list of them, as far as it has come.
        lines: How many lines that is.
        torn: Those of them that look as if they were cut off.
    """

    def __init__(self) -> None:
        self.held = bytearray()
        self.lines = self.torn = 0
        self._end = b""

    def ends_with(self, bare: bytes, *, torn: bool) -> bool:
        """Take a line; tell whether something with a span in it ends there."""
        if end := _ENDS.get(bare):
            self.held, self.lines, self.torn = bytearray(), 0, 0
            self._end = end
        elif not self._end:
            return False
        self.held += bare + b"\n"
        self.lines += 1
        self.torn += torn
        ended = bare == self._end
        if ended or len(self.held) > LONGEST_LINE:
            self._end = b""
        return ended and has_span(self.held)


def _read_line(line: bytes, take: Take, stats: ReadStats) -> None:
    """Read the events of a line, in which others may have written as well."""
    found = Found()
    found.in_line(line.decode("utf-8", "replace"))
    events, spans = (sum(map(take, each)) for each in (found.events, found.spans))
    stats.events += events
    stats.spans += spans
    stats.unfit += len(found.events) + len(found.spans) - events - spans
    if not found.whole or not found.objects:
        stats.broken += 1
    elif not (found.events or found.spans):
        stats.foreign += 1
