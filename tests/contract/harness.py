"""Bare against wrapped: the stores to compare, and how outcomes are compared."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from tracedstore import wrap

# Any, because torch's stubs know less than half of a Store's methods.
Step = Callable[[Any], Any]
Make = Callable[[], Any]

# What differs between two stores of one kind, whoever wraps them.
_OWN = {
    "0x": re.compile(r"0x[0-9a-f]+"),
    "SocketImpl": re.compile(r"SocketImpl\(.*?\)"),
    "port": re.compile(r"port=\d+"),
    "/test/n": re.compile(r"/test/\d+"),
    # Which of the two it is depends on when the server hung up.
    "connection lost": re.compile("Connection reset by peer|Broken pipe"),
}


@dataclass(frozen=True)
class Shape:
    """Where the wrapper stands, and the same without it."""

    bare: Callable[[Store], Any]
    wrapped: Callable[[Store], Any]


def _same(store: Store) -> Store:
    return store


def _under_prefix(store: Store) -> Store:
    return PrefixStore("p", store)


SHAPES = {
    "direct": Shape(bare=_same, wrapped=wrap),
    # All that reaches the wrapper comes from torch's C++.
    "under-prefix": Shape(
        bare=_under_prefix, wrapped=lambda store: PrefixStore("p", wrap(store))
    ),
    "over-prefix": Shape(
        bare=_under_prefix, wrapped=lambda store: wrap(PrefixStore("p", store))
    ),
}
# The caller speaks to the wrapper itself.
OUTERMOST = ("direct", "over-prefix")


def call(method: str, *args: Any, **kwargs: Any) -> Step:
    """Describe one call of a Store method, or the reading of a property."""

    def step(store: Any) -> Any:
        attribute = getattr(store, method)
        return attribute(*args, **kwargs) if callable(attribute) else attribute

    step.__name__ = method
    return step


def outcome(step: Step, store: Any) -> tuple[type, Any]:
    """Give what a step returned, with its type, or what it raised."""
    try:
        result = step(store)
    except Exception as error:
        return type(error), normalised(str(error))
    return type(result), result


def outcomes(steps: Sequence[Step], store: Any) -> list[tuple[type, Any]]:
    """Take all steps, one after the other, whatever becomes of each."""
    return [outcome(step, store) for step in steps]


def normalised(text: str) -> str:
    """Take out of a text what no two stores have in common."""
    for name, pattern in _OWN.items():
        text = pattern.sub(name, text)
    return text
