"""Tries inputs on one target, within bounds of time and memory."""

import resource
import time
from contextlib import suppress
from dataclasses import replace

from fuzz.progress import MAX_INPUT, Counts, Progress
from fuzz.target import Target

# Bytes by which one input may raise the highest memory use of the process.
MAX_PEAK_GROWTH = 256 << 20
# Bytes by which the last three quarters of the inputs may raise the memory use. An
# engine keeps up to this much about its inputs.
MAX_GROWTH = 96 << 20
_PAGE = resource.getpagesize()
_RSS_INTERVAL = 512


class FoundFailure(Exception):  # noqa: N818 - a failure of the target
    """An input is too slow, or takes too much memory."""


class Trial:
    """Tries the inputs of one run."""

    def __init__(
        self, target: Target, total: int, progress: Progress | None = None
    ) -> None:
        self._target = target
        self._total = total
        self._progress = progress
        self._peak = _peak_rss()
        self.counts = Counts(peak_rss=self._peak)
        self.input = b""

    def __call__(self, data: bytes) -> None:
        """Try one input; raise what it raises, or FoundFailure beyond a bound."""
        self.input = data = bytes(data[:MAX_INPUT])
        if self._progress is not None:
            self._progress.begin(data)
        started = time.thread_time_ns()
        with suppress(*self._target.allowed):
            self._target.run(data)
        taken = time.thread_time_ns() - started
        self._count(taken)
        if taken > self._target.max_seconds * 1e9:
            raise FoundFailure(f"{taken / 1e9:.1f} s of CPU time")

    def _count(self, taken: int) -> None:
        peak, before = _peak_rss(), self._peak
        self._peak = peak
        inputs = self.counts.inputs + 1
        self.counts = replace(
            self.counts,
            inputs=inputs,
            slowest_ns=max(taken, self.counts.slowest_ns),
            peak_rss=peak,
        )
        if inputs % _RSS_INTERVAL == 0 or inputs == self._total:
            rss = _rss()
            early = self.counts.early_rss or (rss if inputs * 4 >= self._total else 0)
            self.counts = replace(self.counts, early_rss=early, last_rss=rss)
        if self._progress is not None:
            self._progress.write(self.counts)
        if peak - before > MAX_PEAK_GROWTH:
            raise FoundFailure(f"{(peak - before) >> 20} MB of memory")


def _rss() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - quicker than a Path
        return int(file.read().split()[1]) * _PAGE


def _peak_rss() -> int:
    # Not getrusage: its peak includes that of the parent process before exec.
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123 - quicker than a Path
        text = file.read()
    start = text.index(b"VmHWM:") + len(b"VmHWM:")
    return int(text[start : text.index(b"kB", start)]) * 1024
