"""Fixtures of the integration tests: processes that are gone when the test is."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from integration.harness import Child, Running
from support.etcd import EtcdServer

StartChild = Callable[..., Child]
StartCommand = Callable[..., Running]


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
def start_command(tmp_path: Path) -> Iterator[StartCommand]:
    """Start a command of this environment's, each call of a store being slow."""
    started: list[Running] = []
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        # So that every call that does not wait is told of.
        "TRACEDSTORE_SLOW_AFTER": "0",
    }

    def start(*command: object, **env: str) -> Running:
        name = Path(str(command[0])).name
        started.append(Running(tmp_path, name, *command, env={**environ, **env}))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def tcp_server(start_child: StartChild) -> Child:
    """The server of a TCPStore, in a process of its own; its port is its report."""
    return start_child("tcp_server")


@pytest.fixture(params=["tcp", "file", "etcd"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_server: EtcdServer
) -> tuple[Any, str]:
    """A store that a job has, and its address."""
    if request.param == "tcp":
        store: Any = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
        return store, f"tcp://127.0.0.1:{store.port}"
    if request.param == "file":
        path = tmp_path / "store"
        return dist.FileStore(str(path), -1), f"file://{path}"
    prefix = f"/jobs/{tmp_path.name}"
    url = f"etcd://127.0.0.1:{etcd_server.port}{prefix}"
    return EtcdStore(etcd_server.client(), prefix), url
