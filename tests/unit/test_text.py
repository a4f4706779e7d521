"""Texts for people."""

import pytest

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import (
    duration,
    enumeration,
    host_port,
    plural,
    printable,
    shorten,
    signed_duration,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-1, "0 s"),
        (0.0000123, "12 µs"),
        (0.00345, "3.45 ms"),
        (5.0, "5 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (61, "1 min 1 s"),
        (119.9, "1 min 59 s"),
        (125, "2 min 5 s"),
        (7260, "2 h 1 min"),
        (11045, "3 h 4 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """A duration is in the unit that fits, and the two largest units."""
    assert duration(seconds) == text


def test_duration_has_no_exponent() -> None:
    """A duration that is almost the next unit is a plain number."""
    assert duration(0.9999) == "1 s"
    assert duration(0.0009999) == "1 ms"
    assert duration(59.99) == "1 min 0 s"


@pytest.mark.parametrize(("seconds", "text"), [(-0.5, "-500 ms"), (61, "1 min 1 s")])
def test_signed_durations(seconds: float, text: str) -> None:
    """The offset of a clock may be negative."""
    assert signed_duration(seconds) == text


def test_ranks() -> None:
    """Ranks are folded, a long list is cut, and there may be none."""
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2, 5]) == "ranks 1-2,5"
    assert ranks_text([]) == "no rank"
    assert ranks_text([7, 8], "pid") == "pids 7-8"
    assert ranks_text([1, 3, 5], max_ranges=2) == "ranks 1,3,... and 1 more"
    assert len(ranks_text(range(0, 9999, 2))) < 350


def test_plural() -> None:
    """A number and its noun agree."""
    assert [plural(count, "rank") for count in (0, 1, 2000)] == [
        "0 ranks",
        "1 rank",
        "2,000 ranks",
    ]
    assert plural(2, "process", "es") == "2 processes"


def test_shorten() -> None:
    """A text that is cut has a mark, and the length that was asked for."""
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abc..."


def test_enumeration() -> None:
    """The last of several items is joined with a word."""
    assert enumeration(["a"]) == "a"
    assert enumeration(["a", "b", "c"]) == "a, b and c"


def test_printable() -> None:
    """Control characters and lone surrogates are replaced, one by one."""
    assert printable("a\x1b[31m\ud800b") == "a\ufffd[31m\ufffdb"


def test_host_port() -> None:
    """Only an IPv6 address is in brackets."""
    assert host_port("node1", 29500) == "node1:29500"
    assert host_port("fe80::1", "29500") == "[fe80::1]:29500"
