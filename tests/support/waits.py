"""Whose waits count, for tests whose main thread looks at a blocked call."""

import sys

import pytest

from tracedstore.diagnosis.observe import waits
from tracedstore.local.rank_threads import MAIN


def all_wait_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calls of all threads of this process be waits of its rank."""
    monkeypatch.setattr(
        waits, "rank_threads", lambda: dict.fromkeys(sys._current_frames(), MAIN)
    )
