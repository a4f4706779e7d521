"""The bare and wrapped stores to compare, and how their outcomes are compared."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from tracedstore import TracedStore, wrap

# Any, because torch's stubs have less than half of a Store's methods.
Step = Callable[[Any], Any]
Make = Callable[[], Any]

# Text in messages that differs between two stores of one kind, by its replacement.
_INSTANCE_TEXT = {
    "0x": re.compile(r"0x[0-9a-f]+"),
    "SocketImpl": re.compile(r"SocketImpl\(.*?\)"),
    "port": re.compile(r"port=\d+"),
    "test/n": re.compile(r"test/\d+"),
    # Which one it is depends on when the server closed the connection.
    "connection lost": re.compile("Connection reset by peer|Broken pipe"),
}


@dataclass(frozen=True)
class Shape:
    """One arrangement of wrapper and PrefixStore, and the same without the wrapper."""

    bare: Callable[[Store], Any]
    wrapped: Callable[[Store], Any]


def _same(store: Store) -> Store:
    return store


def _under_prefix(store: Store) -> Store:
    return PrefixStore("p", store)


SHAPES = {
    "direct": Shape(bare=_same, wrapped=wrap),
    # Only torch's C++ calls this wrapper.
    "under-prefix": Shape(
        bare=_under_prefix, wrapped=lambda store: PrefixStore("p", wrap(store))
    ),
    "over-prefix": Shape(
        bare=_under_prefix, wrapped=lambda store: wrap(PrefixStore("p", store))
    ),
}
# The caller calls the wrapper directly.
OUTERMOST = ("direct", "over-prefix")


def call(method: str, *args: Any, **kwargs: Any) -> Step:
    """Return a step that calls a Store method or reads a property."""

    def step(store: Any) -> Any:
        attribute = getattr(store, method)
        return attribute(*args, **kwargs) if callable(attribute) else attribute

    step.__name__ = method
    return step


def outcome(step: Step, store: Any) -> tuple[type, Any]:
    """Return the type and value of a step's result, or the type and text it raised."""
    try:
        result = step(store)
    except Exception as error:
        text = normalised(str(error))
        if isinstance(store, TracedStore):
            # pybind's TypeError has the repr of the object that it was called on.
            inner = normalised(repr(store._traced.inner))
            text = text.replace(f"TracedStore({inner})", inner)
        return type(error), text
    return type(result), result


def outcomes(steps: Sequence[Step], store: Any) -> list[tuple[type, Any]]:
    """Run all steps in order, whether they fail or not, and return their outcomes."""
    return [outcome(step, store) for step in steps]


def normalised(text: str) -> str:
    """Replace what differs between any two stores in a text."""
    for replacement, pattern in _INSTANCE_TEXT.items():
        text = pattern.sub(replacement, text)
    return text
