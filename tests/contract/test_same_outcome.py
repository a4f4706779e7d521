"""A wrapped store has the same results and exceptions as the bare one.

Every method, value and key is compared on every kind of store, on each base that
records this kind. Every method is compared below and above a PrefixStore as well, on
every kind. Unusual values and keys are compared there on one kind of each sort, C++ and
Python: how the wrapper passes them on does not depend on the store that is below.

A test runs many scenarios, each on new stores, and reports all that differ.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from contract.harness import OUTERMOST, SHAPES, Make, Step, outcomes
from contract.scenarios import (
    INVALID_CALLS,
    KEYS,
    NOT_FROM_CPP,
    PUBLIC,
    SCENARIOS,
    VALUES,
)

# One kind of store of C++, and one of Python.
_OF_EACH_SORT = ("hash", "python")
_CONTENT = {f"value-{name}" for name in VALUES} | {f"key-{name}" for name in KEYS}


def scenarios_of(kind: str, shape: str) -> list[str]:
    """Return the names of the scenarios whose path is not another case's."""
    return [
        scenario
        for scenario in SCENARIOS
        if not (shape == "under-prefix" and scenario in NOT_FROM_CPP)
        if shape == "direct" or kind in _OF_EACH_SORT or scenario not in _CONTENT
    ]


def differences(
    make: Make, shape: str, names: Iterable[str], table: Mapping[str, list[Step]]
) -> dict[str, Any]:
    """Return the outcomes, bare and wrapped, of the scenarios where they differ."""
    found = {}
    for name in names:
        bare = outcomes(table[name], SHAPES[shape].bare(make()))
        wrapped = outcomes(table[name], SHAPES[shape].wrapped(make()))
        if wrapped != bare:
            found[name] = (bare, wrapped)
    return found


class TestScenarios:
    """The scenarios on every kind of store, bare and wrapped."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_has_same_outcome(self, make: Make, kind: str, shape: str) -> None:
        """Results and exceptions equal the bare store's in type, value and text."""
        assert differences(make, shape, scenarios_of(kind, shape), SCENARIOS) == {}

    @pytest.mark.parametrize("shape", OUTERMOST)
    def test_invalid_call_has_same_exception(self, make: Make, shape: str) -> None:
        """Invalid arguments raise the same exception with the same text."""
        assert differences(make, shape, INVALID_CALLS, INVALID_CALLS) == {}

    def test_cover_every_method(self) -> None:
        """At least one scenario of every kind uses each method of torch's Store."""
        used = {
            step.__name__
            for name in scenarios_of("tcp", "over-prefix")
            for step in SCENARIOS[name]
        }

        assert set(PUBLIC) <= used


class TestExactBytes:
    """Values are exactly bytes: torch calls bytes methods on them."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_are_returned(self, make: Make, shape: str) -> None:
        """get() and multi_get() return the value that was set, as bytes."""
        store: Any = SHAPES[shape].wrapped(make())

        for value in (b"", bytes(range(256)), "wärt".encode()):
            store.set("k", value)
            values = [store.get("k"), *store.multi_get(["k"])]

            assert values == [value, value]
            assert set(map(type, values)) == {bytes}
