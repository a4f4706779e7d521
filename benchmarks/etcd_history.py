"""Checks that a history of concurrent calls is linearizable, as Wing and Gong do.

A call takes effect at one time between its start and its end. The checker looks for an
order of the calls that explains every result. A call whose outcome is unknown may have
taken effect at any time after its start, or not at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

State = tuple[Any, ...]
# Returns the state after a call, and its result.
Model = Callable[[State, str, tuple[Any, ...]], tuple[State, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client.

    Attributes:
        started: When it began.
        ended: When it returned; infinite if its outcome is unknown.
        name: The operation.
        args: Its arguments.
        result: Its result; anything if its outcome is unknown.
    """

    started: float
    ended: float
    name: str
    args: tuple[Any, ...]
    result: Any = None

    @property
    def is_known(self) -> bool:
        """Whether the caller got a result."""
        return self.ended < inf


def register(state: State, name: str, args: tuple[Any, ...]) -> tuple[State, Any]:
    """Model a key with get, set and compare_set; the state has its value."""
    (value,) = state or (None,)
    if name == "set":
        return (args[0],), None
    if name == "compare_set":
        expected, desired = args
        if value == expected or (value is None and expected == b""):
            return (desired,), desired
        return (value,), expected if value is None else value
    return (value,), value


def counter(state: State, _name: str, args: tuple[Any, ...]) -> tuple[State, Any]:
    """Model a key with add; the state has the sum."""
    total = (state[0] if state else 0) + args[0]
    return (total,), total


def queue(state: State, name: str, args: tuple[Any, ...]) -> tuple[State, Any]:
    """Model a queue with push and pop; the state has its entries."""
    if name == "push":
        return (*state, args[0]), None
    return (state[1:], state[0]) if state else ((), None)


def is_linearizable(calls: Sequence[Call], model: Model) -> bool:
    """Return whether an order of the calls explains all results."""
    calls = sorted(calls, key=lambda call: call.started)
    everything = frozenset(n for n, call in enumerate(calls) if call.is_known)
    seen: set[tuple[frozenset[int], State]] = set()
    pending: list[tuple[frozenset[int], State]] = [(frozenset(), ())]
    while pending:
        done, state = pending.pop()
        if everything <= done:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        left = [n for n in range(len(calls)) if n not in done]
        # A call that began after another one had ended comes after it.
        first_end = min(calls[n].ended for n in left)
        for n in left:
            call = calls[n]
            if call.started > first_end:
                break
            after, result = model(state, call.name, call.args)
            if not call.is_known or result == call.result:
                pending.append((done | {n}, after))
    return False
