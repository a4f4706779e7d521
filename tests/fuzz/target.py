"""What a fuzz target is."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Inputs = st.SearchStrategy[bytes]

# Nested deeper than Python's recursion limit, and just below it.
_NESTED = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser under test.

    Attributes:
        name: Its name on the command line.
        run: Parses one input, and uses the result as the product does. An exception
            other than `allowed` is a failure, a failed assertion too.
        inputs: Structured inputs, for Hypothesis and as atheris's first inputs.
        allowed: Exceptions that are part of the parser's contract.
        share: Its share of the inputs, relative to the other targets. Slow targets
            have a smaller one.
        max_seconds: CPU time for one input. atheris's instrumentation triples it.
    """

    name: str
    run: Callable[[bytes], None]
    inputs: Inputs
    allowed: tuple[type[Exception], ...] = ()
    share: float = 1.0
    max_seconds: float = 2.0


# Folded ranks. A million of them take a third of a second, so they are rare.
_RANGES = ("0-3", "0,2", "0-99", "5-1", "0-9999999999", "1,1,1", "", "x")
RANGES = st.integers(0, 199).map(
    lambda n: _RANGES[n % len(_RANGES)] if n else "0-999999"
)


def changed_bytes(valid: Inputs) -> Inputs:
    """Return valid inputs, and valid inputs in which a part is replaced or cut off."""

    def change(parts: tuple[bytes, int, int, bytes]) -> bytes:
        whole, start, length, replacement = parts
        start %= len(whole) + 1
        return whole[:start] + replacement + whole[start + length :]

    changed = st.tuples(
        valid, st.integers(0, 4096), st.integers(0, 64), st.binary(max_size=12)
    ).map(change)
    return valid | changed


def changed_json(valid: dict[str, Any], value: st.SearchStrategy[Any]) -> Inputs:
    """Return an object as JSON, with changed, added and removed fields."""
    fields = sorted(valid)
    changed = st.dictionaries(
        st.sampled_from(fields) | st.text(max_size=8), value, max_size=4
    ).map(lambda some: {**valid, **some})
    removed = st.sets(st.sampled_from(fields), max_size=2).map(
        lambda some: {name: valid[name] for name in fields if name not in some}
    )
    encoded = (changed | removed | value).map(lambda one: json.dumps(one).encode())
    # By number: Hypothesis prints the elements of a strategy.
    nested = st.integers(0, len(_NESTED) - 1).map(_NESTED.__getitem__)
    return changed_bytes(encoded) | st.binary(max_size=64) | nested
