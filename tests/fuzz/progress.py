"""The progress of a worker, in a file that its monitor reads.

The file has the input in progress, so that the input is known whatever ends the worker:
a segmentation fault, a hang, or too much memory.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

MAX_INPUT = 1 << 20
_COUNTS = struct.Struct("<QQQQQ")
_LENGTH = struct.Struct("<Q")
_SIZE = _COUNTS.size + _LENGTH.size + MAX_INPUT


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one worker.

    Attributes:
        inputs: Inputs that were tried.
        slowest_ns: CPU time of the slowest one.
        early_rss: Resident bytes after the first quarter of the inputs.
        last_rss: Resident bytes at the end.
        peak_rss: The highest number of resident bytes.
    """

    inputs: int = 0
    slowest_ns: int = 0
    early_rss: int = 0
    last_rss: int = 0
    peak_rss: int = 0


class Progress:
    """The counts and the input in progress, shared by a worker and its monitor."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def begin(self, data: bytes) -> None:
        """Note the input that is tried next."""
        start = _COUNTS.size + _LENGTH.size
        self._map[start : start + len(data)] = data
        _LENGTH.pack_into(self._map, _COUNTS.size, len(data))

    def write(self, counts: Counts) -> None:
        """Note the counts."""
        _COUNTS.pack_into(
            self._map,
            0,
            counts.inputs,
            counts.slowest_ns,
            counts.early_rss,
            counts.last_rss,
            counts.peak_rss,
        )

    def counts(self) -> Counts:
        """Return the counts."""
        return Counts(*_COUNTS.unpack_from(self._map))

    def input(self) -> bytes:
        """Return the input in progress, or the last one."""
        (length,) = _LENGTH.unpack_from(self._map, _COUNTS.size)
        start = _COUNTS.size + _LENGTH.size
        return self._map[start : start + length]
