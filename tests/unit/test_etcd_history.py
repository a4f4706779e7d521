"""The check for linearizable histories finds the wrong ones."""

from math import inf
from typing import Any

import pytest
from etcd_history import Call, Model, counter, is_linearizable, queue, register


def call(started: float, ended: float, name: str, *args: Any, result: Any) -> Call:
    """Return a call with a known result."""
    return Call(started, ended, name, args, result)


def unknown(started: float, name: str, *args: Any) -> Call:
    """Return a call whose outcome is unknown."""
    return Call(started, inf, name, args)


SET_A = call(0, 1, "set", b"a", result=None)


@pytest.mark.parametrize(
    ("model", "calls", "expected"),
    [
        (register, [SET_A, call(2, 3, "get", result=b"a")], True),
        # Stale: the write had ended before the read began.
        (register, [SET_A, call(2, 3, "get", result=None)], False),
        (register, [SET_A, call(0.5, 3, "get", result=None)], True),
        # A write of unknown outcome may have happened late, or not at all, not twice.
        (
            register,
            [SET_A, unknown(1, "set", b"b"), call(5, 6, "get", result=b"a")],
            True,
        ),
        (
            register,
            [SET_A, unknown(1, "set", b"b"), call(5, 6, "get", result=b"b")],
            True,
        ),
        (
            register,
            [
                unknown(0, "set", b"b"),
                call(1, 2, "get", result=b"b"),
                call(3, 4, "set", b"a", result=None),
                call(5, 6, "get", result=b"b"),
            ],
            False,
        ),
        # Two winners.
        (
            register,
            [
                call(0, 1, "compare_set", b"", b"x", result=b"x"),
                call(0, 1, "compare_set", b"", b"y", result=b"y"),
            ],
            False,
        ),
        (
            counter,
            [call(0, 2, "add", 1, result=2), call(0, 2, "add", 1, result=1)],
            True,
        ),
        # A lost one, and one that counts twice.
        (
            counter,
            [call(0, 1, "add", 1, result=1), call(2, 3, "add", 1, result=1)],
            False,
        ),
        (
            counter,
            [call(0, 1, "add", 1, result=1), call(2, 3, "add", 1, result=3)],
            False,
        ),
        (
            queue,
            [
                call(0, 1, "push", b"a", result=None),
                call(2, 3, "push", b"b", result=None),
                call(4, 5, "pop", result=b"b"),
            ],
            False,
        ),
        (
            queue,
            [
                call(0, 1, "push", b"a", result=None),
                call(2, 3, "pop", result=b"a"),
                call(4, 5, "pop", result=b"a"),
            ],
            False,
        ),
        (
            queue,
            [
                unknown(0, "push", b"a"),
                call(2, 3, "pop", result=None),
                call(4, 5, "pop", result=b"a"),
            ],
            True,
        ),
    ],
)
def test_history(model: Model, calls: list[Call], expected: bool) -> None:
    """A history is accepted if an order of its calls explains all results."""
    assert is_linearizable(calls, model) is expected
