"""Targets that fail in every way, to test the fuzzers themselves."""

import os
import resource
import time

from hypothesis import strategies as st

from fuzz.target import Target
from fuzz.trial import MAX_PEAK_GROWTH

_MAX_SECONDS = 0.5
_kept: list[bytes] = []


def _raise(data: bytes) -> None:
    if data[1:2] == b"\x07":
        raise LookupError("seven")


def _end(data: bytes) -> None:
    if data[1:2] == b"\x07":
        os._exit(3)


def _hang(data: bytes) -> None:
    if data[1:2] == b"\x07":
        time.sleep(600)


def _compute(data: bytes) -> None:
    if data[1:2] == b"\x07":
        end = time.thread_time() + 2 * _MAX_SECONDS
        while time.thread_time() < end:
            pass


def _allocate(data: bytes) -> None:
    if data[1:2] == b"\x07":
        # More than the highest use so far: the system may have reclaimed idle memory.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        bytearray(peak + MAX_PEAK_GROWTH + (64 << 20)).count(1)


def _grow(_data: bytes) -> None:
    _kept.append(b"x" * 60_000)


_INPUTS = st.tuples(st.binary(min_size=1, max_size=1), st.integers(0, 9)).map(
    lambda parts: parts[0] + bytes([parts[1]])
)
TARGETS = {
    run.__name__.removeprefix("_"): Target(
        name=run.__name__.removeprefix("_"),
        run=run,
        inputs=_INPUTS,
        max_seconds=_MAX_SECONDS,
    )
    for run in (_raise, _end, _hang, _compute, _allocate, _grow)
}
