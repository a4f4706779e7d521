"""Fixtures of the integration tests: processes that are gone when the test is."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.harness import Child

StartChild = Callable[..., Child]


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[StartChild]:
    """Start a script of children/ in a process of its own."""
    started: list[Child] = []

    def start(script: str, *args: object, env: dict[str, str] | None = None) -> Child:
        started.append(Child(tmp_path, script, *args, env=env or {}))
        return started[-1]

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def tcp_server(start_child: StartChild) -> Child:
    """The server of a TCPStore, in a process of its own; its port is its report."""
    return start_child("tcp_server")
