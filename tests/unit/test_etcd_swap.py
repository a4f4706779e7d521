"""Lost answers: what a compare-and-set and a pop report about them.

A real server cannot be made to lose a certain answer, so the transport is a script.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tracedstore.etcd import EtcdOutcomeUnknownError, EtcdUnreachableError
from tracedstore.etcd.gateway import Gateway, Message, text
from tracedstore.etcd.namespace import (
    Content,
    Namespace,
    Swap,
    key_range,
    prefix_of,
    swap,
)

KEYS = key_range(prefix_of("job"), "k")
OLD = Content(keys=KEYS, revision=10, value=b"old", modified=8)
LOST = EtcdOutcomeUnknownError("lost")
DOWN = EtcdUnreachableError("down")


def found(value: bytes, modified: int) -> Message:
    """Return a key as etcd's API has it."""
    return {
        "key": text(KEYS.value),
        "value": text(value),
        "create_revision": "1",
        "mod_revision": str(modified),
        "version": "1",
    }


def failed(value: bytes, modified: int) -> Message:
    """Return the answer of a transaction whose condition did not hold."""
    kvs = {"kvs": [found(value, modified)]}
    return {"header": {"revision": "20"}, "responses": [{"response_range": kvs}]}


SUCCEEDED = {"header": {"revision": "20"}, "succeeded": True}


class Script(Gateway):
    """A transport that answers as it was told."""

    def __init__(self, *answers: Message | Exception, history: Any = None) -> None:
        self._answers = list(answers)
        self._history = history

    def call(
        self,
        method: str,
        request: Mapping[str, Any],
        deadline: float,
        *,
        repeatable: bool,
    ) -> Message:
        """Return or raise the next answer."""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def watch(
        self, request: Mapping[str, Any], deadline: float
    ) -> Iterator[Iterator[Message]]:
        """Return the first change of the value."""
        if isinstance(self._history, Exception):
            raise self._history
        value, modified = self._history
        yield iter([{"created": True}, {"events": [{"kv": found(value, modified)}]}])

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script(SUCCEEDED), Swap.WON),
        (Script(failed(b"theirs", 15)), Swap.LOST),
        # The repeated one is the only change.
        (Script(LOST, SUCCEEDED, history=(b"new", 20)), Swap.WON),
        # The value was written before the repeated one.
        (Script(LOST, failed(b"new", 15), history=(b"new", 15)), Swap.SAME),
        (Script(LOST, LOST, failed(b"later", 17), history=(b"new", 15)), Swap.SAME),
        (Script(LOST, failed(b"theirs", 15), history=(b"theirs", 15)), Swap.LOST),
    ],
)
def test_definite(script: Script, expected: Swap) -> None:
    """The history decides what became of a lost answer."""
    assert swap(script, OLD, b"new", 0.0)[0] is expected


@pytest.mark.parametrize(
    "script",
    [
        # Nothing answers any more.
        Script(LOST, DOWN),
        # The history is compacted, or cannot be read.
        Script(LOST, failed(b"theirs", 15), history=TimeoutError()),
        Script(LOST, failed(b"theirs", 15), history=DOWN),
        # The lost one was applied, and its effect undone.
        Script(LOST, SUCCEEDED, history=(b"new", 15)),
    ],
)
def test_unknown(script: Script) -> None:
    """What cannot be decided is reported as unknown."""
    with pytest.raises(EtcdOutcomeUnknownError):
        swap(script, OLD, b"new", 0.0)


def test_unreachable() -> None:
    """A request that was not sent is not reported as unknown."""
    with pytest.raises(EtcdUnreachableError):
        swap(Script(DOWN), OLD, b"new", 0.0)


ENTRY = {"header": {"revision": "9"}, "kvs": [found(b"entry", 8)]}


def test_pop_is_repeated() -> None:
    """A pop whose answer was lost succeeds if the entry was still there."""
    namespace = Namespace("job", Script(ENTRY, LOST, SUCCEEDED))

    assert namespace.pop(KEYS, 0.0) == (b"entry", 9)


@pytest.mark.parametrize("last", [failed(b"next", 9), DOWN])
def test_pop_of_unknown_outcome(last: Message | Exception) -> None:
    """If the entry is gone, or nothing answers, the outcome is unknown."""
    namespace = Namespace("job", Script(ENTRY, LOST, last))

    with pytest.raises(EtcdOutcomeUnknownError):
        namespace.pop(KEYS, 0.0)
