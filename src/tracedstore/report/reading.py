"""Log files to events: whatever else stands in them is counted and passed over."""

import gzip
import io
import json
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from tracedstore.report.spans import as_event
from tracedstore.signals import names

STANDARD_INPUT: Final = "-"
# An event that names 100,000 missing ranks has some 3 MB.
_LONGEST_LINE = 16 << 20
# Beginnings of objects that are tried in a line where several writers met.
_MOST_TRIES = 16
# Lines of one span as ConsoleSpanExporter writes it by default: indented.
_LONGEST_SPAN = 2000

_EVENT = re.compile(
    rb'"event": ?"(?:%s)"' % b"|".join(re.escape(n.encode()) for n in names.EVENT_NAMES)
)
_SPAN = f'"{names.BARRIER_PREFIX}"'.encode()
_NAMES = frozenset(names.EVENT_NAMES)


@dataclass(slots=True)
class Tally:
    """What was read, and what was not.

    Attributes:
        files: Files that were read.
        lines: Lines in them.
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


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def files_in(places: Iterable[str], but: Path) -> list[str]:
    """List the files that are meant: folders with all below them, each file once.

    Args:
        places: Files, folders, or "-".
        but: A file that is not meant: the report itself.
    """
    found: dict[tuple[int, int] | str, str] = {}
    if but.exists():
        of_report = but.stat()
        skip = {(of_report.st_dev, of_report.st_ino)}
    else:
        skip = set()
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
                if identity not in skip:
                    found.setdefault(identity, str(file))
    return list(found.values())


def events_in(files: Iterable[str], tally: Tally) -> Iterator[dict[str, Any]]:
    """Give every event, and every span of a barrier as the event it stands for."""
    for name in files:
        try:
            with _opened(name) as file:
                tally.files += 1
                yield from _events(file, tally)
        except (OSError, EOFError, zlib.error) as error:
            # A rank that was killed leaves half a gzip behind it.
            said = getattr(error, "strerror", None) or str(error)
            tally.damaged.append(f"{name}: {said}")


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    source = (
        io.FileIO(sys.stdin.fileno(), closefd=False)
        if name == STANDARD_INPUT
        else io.FileIO(name)
    )
    with io.BufferedReader(source) as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            with io.BufferedReader(gzip.GzipFile(fileobj=file)) as unpacked:
                yield unpacked
        else:
            yield file


def _events(file: IO[bytes], tally: Tally) -> Iterator[dict[str, Any]]:
    spread: list[bytes] | None = None
    for line in iter(partial(file.readline, _LONGEST_LINE), b""):
        tally.lines += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            tally.long += 1
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
        elif _EVENT.search(line) or (_SPAN in line and b'{"' in line):
            yield from _of_line(line, tally)
        else:
            tally.foreign += 1
            bare = line.rstrip()
            if bare == b"{":
                spread = []
            elif spread is not None and len(spread) < _LONGEST_SPAN:
                spread.append(bare)
                if bare == b"}":
                    whole, spread = b"\n".join([b"{", *spread]), None
                    if _SPAN in whole:
                        tally.foreign -= whole.count(b"\n") + 1
                        yield from _of_line(whole, tally)
            elif b'{"' in bare and not bare.endswith(b"}"):
                tally.foreign -= 1
                tally.broken += 1


def _of_line(line: bytes, tally: Tally) -> Iterator[dict[str, Any]]:
    """Give the events of a line, in which others may have written as well."""
    text = line.decode("utf-8", "replace")
    position, found, whole = 0, 0, True
    for _ in range(_MOST_TRIES):
        position = text.find("{", position)
        if position < 0:
            break
        try:
            told, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            whole = False
            position += 1
            continue
        event = told.get("event")
        if isinstance(event, str) and event in _NAMES:
            found += 1
            tally.events += 1
            yield told
        elif (span := as_event(told)) is not None:
            found += 1
            tally.spans += 1
            yield span
        if '"' not in text[position:]:
            break
    if not whole or not found:
        tally.broken += 1
