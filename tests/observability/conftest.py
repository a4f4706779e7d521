"""Fixtures of the signals: every signal, on both recording bases."""

import pytest

from support.native import use_core


@pytest.fixture(params=["python", "native"], autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recording base; tests run once for each base."""
    return use_core(request.param, monkeypatch)
