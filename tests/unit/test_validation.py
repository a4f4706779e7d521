"""Every check of a value from a store, each with values that only it refuses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tracedstore.common import validation

integer = partial(validation.integer, below=100)
digits = partial(validation.digits, below=100)
load_json = partial(validation.load_json, max_bytes=200_000)

ACCEPTED: list[tuple[Callable[[Any], Any], Any, Any]] = [
    (integer, 0, 0),
    (integer, 99, 99),
    (digits, b"0", 0),
    (digits, b"99", 99),
    (validation.seconds, 0, 0.0),
    (validation.seconds, 99999999999.0, 99999999999.0),
    (validation.text, "x" * 1024, "x" * 1024),
    (validation.http_url, "http://h:1/metrics", "http://h:1/metrics"),
    (validation.http_url, "https://[::1]:65535", "https://[::1]:65535"),
    (validation.host_and_port, "h:65535", "h:65535"),
    (validation.host_and_port, "[::1]:1", "[::1]:1"),
    (load_json, b'{"a": [1.5, null]}', {"a": [1.5, None]}),
]
REFUSED: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (integer, [-1, 100, True, 1.0, "1", None]),
    (digits, [b"", b"-1", b"+1", b" 1", b"1_0", b"100", "²".encode()]),
    (validation.seconds, [-1, -0.1, 1e11, float("nan"), float("inf"), True, "1"]),
    (validation.text, ["", "x" * 1025, 3, None, b"x"]),
    (
        validation.http_url,
        [
            *("ftp://h:1", "h:1", "//h:1", "http://", "http://:1", "http://a@h:1"),
            *("http://h:0", "http://h:65536", "http://h:x", "http://[::1"),
            *("http://h :1", "http://h:1/\u00e9", "http://h:1/\x7f", "http://h:1/\n"),
            *(3, "http://h/" + "x" * 1024),
        ],
    ),
    (
        validation.host_and_port,
        [
            *("h", ":1", "h:", "h:0", "h:65536", "h:x", "h:+1", "h:1_0"),
            *("a/b:1", "a@b:1", "a?b:1", "a#b:1", "a b:1", "\u00e9:1", "a\x7f:1", 1),
        ],
    ),
    (
        load_json,
        [
            *(b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"{", b"\xff", b""),
            *(b"[" * 100_000, b" " * 200_000 + b"1", b"9" * 5000),
        ],
    ),
]


@pytest.mark.parametrize(("check", "value", "result"), ACCEPTED)
def test_accepted(check: Callable[[Any], Any], value: Any, result: Any) -> None:
    """A valid value is returned."""
    assert check(value) == result


@pytest.mark.parametrize(
    ("check", "value"), [(check, value) for check, some in REFUSED for value in some]
)
def test_refused(check: Callable[[Any], Any], value: Any) -> None:
    """Any other value raises ValueError."""
    with pytest.raises(ValueError, match=r"."):
        check(value)


def test_long_counter() -> None:
    """The length of a counter is checked before it is converted."""

    class Long(bytes):
        def isdigit(self) -> bool:
            raise AssertionError("converted")

    with pytest.raises(ValueError, match="not a number"):
        digits(Long(b"9" * 4000))
