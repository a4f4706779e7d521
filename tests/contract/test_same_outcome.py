"""A wrapped store has the same results and exceptions as the bare one."""

from typing import Any

import pytest

from contract.harness import OUTERMOST, SHAPES, Make, outcomes
from contract.scenarios import INVALID_CALLS, NOT_FROM_CPP, PUBLIC, SCENARIOS

CASES = [
    pytest.param(shape, scenario, id=f"{shape}-{scenario}")
    for shape in SHAPES
    for scenario in SCENARIOS
    if not (shape == "under-prefix" and scenario in NOT_FROM_CPP)
]


class TestScenarios:
    """Every scenario on every kind of store, bare and wrapped."""

    @pytest.mark.parametrize(("shape", "scenario"), CASES)
    def test_has_same_outcome(self, make: Make, shape: str, scenario: str) -> None:
        """Results and exceptions equal the bare store's in type, value and text."""
        steps = SCENARIOS[scenario]

        expected = outcomes(steps, SHAPES[shape].bare(make()))

        assert outcomes(steps, SHAPES[shape].wrapped(make())) == expected

    @pytest.mark.parametrize("shape", OUTERMOST)
    @pytest.mark.parametrize("method", INVALID_CALLS)
    def test_invalid_call_has_same_exception(
        self, make: Make, shape: str, method: str
    ) -> None:
        """Invalid arguments raise the same exception with the same text."""
        steps = INVALID_CALLS[method]

        expected = outcomes(steps, SHAPES[shape].bare(make()))

        assert outcomes(steps, SHAPES[shape].wrapped(make())) == expected

    def test_cover_every_method(self) -> None:
        """At least one scenario uses each method of this torch's Store."""
        used = {step.__name__ for steps in SCENARIOS.values() for step in steps}

        assert set(PUBLIC) <= used


class TestExactBytes:
    """Values are exactly bytes: torch calls bytes methods on them."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("value", [b"", bytes(range(256)), "wärt".encode()])
    def test_are_returned(self, make: Make, shape: str, value: bytes) -> None:
        """get() and multi_get() return the value that was set, as bytes."""
        store: Any = SHAPES[shape].wrapped(make())
        store.set("k", value)

        values = [store.get("k"), *store.multi_get(["k"])]

        assert values == [value, value]
        assert set(map(type, values)) == {bytes}
