"""Fixtures of the integration tests: processes that are killed after the test."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from integration.harness import Child, Running
from support.etcd import EtcdServer
from support.torchrun import Agent

StartChild = Callable[..., Child]
StartCommand = Callable[..., Running]
StartAgent = Callable[..., Agent]

# How often agents check their workers; torchrun's default is five seconds.
_MONITOR = ("--monitor-interval", "0.1")


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[StartChild]:
    """Return a function that starts a script of children/ as a process."""
    started: list[Child] = []

    def start(
        script: str,
        *args: object,
        env: dict[str, str] | None = None,
        forked: bool = True,
    ) -> Child:
        child = Child(tmp_path, script, *args, env=env or {}, forked=forked)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def start_command(tmp_path: Path) -> Iterator[StartCommand]:
    """Return a function that starts a command of this virtual environment."""
    started: list[Running] = []
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        # Every call that does not block is slow, and so emits an event.
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
def start_agent(tmp_path: Path) -> Iterator[StartAgent]:
    """Start torchrun; it is killed at the end of the test."""
    started: list[Agent] = []

    def start(
        backend: str,
        endpoint: str,
        run_id: str,
        *args: str,
        command: Sequence[str] = (),
        **env: str,
    ) -> Agent:
        folder = tmp_path / f"agent-{len(started)}"
        rendezvous = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
        agent = Agent(
            folder,
            *(*rendezvous, "--rdzv-id", run_id, *_MONITOR, *args),
            env=env,
            command=command,
        )
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.kill()


@pytest.fixture
def tcp_server(start_child: StartChild) -> Child:
    """A process that serves a TCPStore; it reports the port."""
    return start_child("tcp_server")


@pytest.fixture(params=["tcp", "file", "etcd"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_server: EtcdServer
) -> tuple[Any, str]:
    """The store of a job, and its URL."""
    if request.param == "tcp":
        store: Any = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
        return store, f"tcp://127.0.0.1:{store.port}"
    if request.param == "file":
        path = tmp_path / "store"
        return dist.FileStore(str(path), -1), f"file://{path}"
    prefix = f"/jobs/{tmp_path.name}"
    url = f"etcd://127.0.0.1:{etcd_server.port}{prefix}"
    return EtcdStore(etcd_server.client(), prefix), url


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd for one test."""
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()
