"""Calls that a program repeats: which of them are one wait."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tracedstore.diagnosis.observe import waits
from tracedstore.diagnosis.observe.waits import Waits
from tracedstore.recording.recorder import RECORDER


@pytest.mark.parametrize(
    ("pause", "calls", "moved_at", "is_one"),
    [
        (0.05, 50, 0.0, True),  # torch's barrier counts its arrivals
        (2.0, 1, 0.0, True),  # a loop that sleeps
        (2.0, 3, 0.0, True),  # and writes that it is alive
        (2.0, 9, 0.0, False),  # a step of work
        (2.0, 1, 101.0, False),  # a step with a collective
        (2.0, 1, 99.0, True),
    ],
)
def test_step_of_work_between_waits(
    monkeypatch: pytest.MonkeyPatch,
    pause: float,
    calls: int,
    moved_at: float,
    is_one: bool,
) -> None:
    """A program that looks for a key in each step of its work does not wait for it."""
    now, began, ended = 100.0, 99.9, 1000
    monkeypatch.setattr(waits, "key_of", lambda _active: "key")
    monkeypatch.setattr(waits, "waited_seconds", lambda *_: now - began)
    monkeypatch.setattr(waits, "ended_calls", lambda _recorder: ended)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    found = Waits(RECORDER, lambda: moved_at)
    first = found.timed_out(active := Mock())

    began = now + pause
    now, ended = began + 0.02, ended + calls
    again = found._repeated(active)
    now, ended = now + 30.0, ended + 1000  # calls of other threads
    later = found._repeated(active)

    assert again is later
    assert (again is first) is is_one
