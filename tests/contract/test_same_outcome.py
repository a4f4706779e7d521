"""A wrapped store answers as the bare one does, whatever it is asked."""

from typing import Any

import pytest

from contract.harness import OUTERMOST, SHAPES, Make, outcomes
from contract.scenarios import MISTAKES, NOT_FROM_CPP, PUBLIC, SCENARIOS

CASES = [
    pytest.param(shape, scenario, id=f"{shape}-{scenario}")
    for shape in SHAPES
    for scenario in SCENARIOS
    if not (shape == "under-prefix" and scenario in NOT_FROM_CPP)
]


class TestScenarios:
    """Every scenario on every kind of store, bare and wrapped."""

    @pytest.mark.parametrize(("shape", "scenario"), CASES)
    def test_ends_the_same(self, make: Make, shape: str, scenario: str) -> None:
        """Results and exceptions are the bare store's, in type, value and text."""
        steps = SCENARIOS[scenario]

        expected = outcomes(steps, SHAPES[shape].bare(make()))

        assert outcomes(steps, SHAPES[shape].wrapped(make())) == expected

    @pytest.mark.parametrize("shape", OUTERMOST)
    @pytest.mark.parametrize("method", MISTAKES)
    def test_mistake_is_told_the_same(
        self, make: Make, shape: str, method: str
    ) -> None:
        """Arguments that a method does not take are refused in the same words."""
        steps = MISTAKES[method]

        expected = outcomes(steps, SHAPES[shape].bare(make()))

        assert outcomes(steps, SHAPES[shape].wrapped(make())) == expected

    def test_leave_no_method_out(self) -> None:
        """Whatever this torch's Store has, some scenario uses."""
        used = {step.__name__ for steps in SCENARIOS.values() for step in steps}

        assert set(PUBLIC) <= used


class TestExactBytes:
    """Equal is not enough: torch's own code calls bytes methods on what it gets."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("value", [b"", bytes(range(256)), "wärt".encode()])
    def test_come_back(self, make: Make, shape: str, value: bytes) -> None:
        """What was set is what get and multi_get return, as bytes and nothing else."""
        store: Any = SHAPES[shape].wrapped(make())
        store.set("k", value)

        got = [store.get("k"), *store.multi_get(["k"])]

        assert got == [value, value]
        assert set(map(type, got)) == {bytes}
