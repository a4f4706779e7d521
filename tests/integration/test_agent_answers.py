"""Tests of the answers of torchrun's agent for its workers."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    start_processes,
)

from integration.harness import Running, pause, wait_until
from support import stores
from tracedstore.common import threads
from tracedstore.diagnosis.ask import responder as responders
from tracedstore.diagnosis.ask.questions import ask
from tracedstore.diagnosis.ask.responder import AgentResponder
from tracedstore.local import sockets
from tracedstore.local.facts import ProcessFacts
from tracedstore.local.host_ranks import AgentWorkers
from tracedstore.local.sockets import (
    LOCAL_SOCKET,
    LocalReply,
    ask_processes,
    local_processes,
)

LONG = 60.0
SCRIPT = """\
import os, sys, time
if os.environ["RANK"] == "1":
    import torch
    sys.exit(0)
if os.environ["RANK"] == "2":
    import torch
    def load_dataset():
        sys.stdout.write("loading\\n")
        sys.stdout.flush()
        time.sleep(600)
    load_dataset()
import torch.distributed as dist
dist.init_process_group("gloo")
"""


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets that only this test uses."""
    private = tmp_path / f"tracedstore-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sockets, "directory_candidates", lambda: [str(private)])
    yield private
    LOCAL_SOCKET.stop(5)
    LOCAL_SOCKET.reset()


def start_workers(store: Any, folder: Path, *commands: str) -> PContext:
    """Start workers as torchrun's agent does; each runs a shell command."""
    folder.mkdir()
    environ = {
        "WORLD_SIZE": str(len(commands)),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return start_processes(
        name="trainer",
        entrypoint="/bin/sh",
        args={n: ("-c", command) for n, command in enumerate(commands)},
        envs={n: {**environ, "RANK": str(n)} for n in range(len(commands))},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentResponder]:
    """An agent in this process, which polls fast."""
    monkeypatch.setattr(responders, "poll_interval", lambda *_: 0.05)
    monkeypatch.setattr(responders, "_FIRST_RETRY", 0.05)
    responder = AgentResponder(AgentWorkers())
    yield responder
    responder.stop()
    assert threads.join_bounded_threads(LONG)


class TestAgentWorkers:
    """Workers that torch started, in every state."""

    def test_states(self, agent: AgentResponder, tmp_path: Path) -> None:
        """Running, stopped, exited and killed workers, with their exit codes."""
        store = stores.tcp(tmp_path)
        processes = start_workers(
            store, tmp_path / "logs", *["exec sleep 100"] * 3, "exit 3", "exit 0"
        )
        try:
            pids = processes.pids()
            pause(pids[1])
            os.kill(pids[2], signal.SIGKILL)
            agent.started(processes)
            wait_until(
                lambda: [a.state for a in agent.workers.answers()].count("gone") == 3
            )

            through_store = ask(stores.second_client(store), "status", range(5), LONG)
            own = ask_processes([os.getpid()], "status", LONG)[os.getpid()]
        finally:
            processes.close(signal.SIGKILL)

        expected = [
            ("running", ""),
            ("stopped", "stopped by a signal (T)"),
            ("gone", "killed by SIGKILL"),
            ("gone", "exited with code 3"),
            ("gone", "exited with code 0"),
        ]
        assert own is not None
        assert own.identity.rank is None
        for answers in (list(own.workers), [through_store[n] for n in range(5)]):
            assert [(one.state, one.detail) for one in answers] == expected
            assert {one.source for one in answers} == {"its agent"}
            assert [one.pid for one in answers] == list(pids.values())
            assert not any(one.registered for one in answers)

    def test_exit_code_after_wait(self, agent: AgentResponder, tmp_path: Path) -> None:
        """The exit code is known after torch has waited for the worker."""
        store = stores.tcp(tmp_path)
        processes = start_workers(store, tmp_path / "logs", "exit 5")
        agent.started(processes)
        processes.wait(LONG)

        (answer,) = agent.workers.answers()

        assert (answer.state, answer.detail) == ("gone", "exited with code 5")

    def test_restart(self, agent: AgentResponder, tmp_path: Path) -> None:
        """After a restart the agent answers for the new workers only."""
        store = stores.tcp(tmp_path)
        before = start_workers(store, tmp_path / "logs0", "exec sleep 100")
        agent.started(before)
        before.close(signal.SIGKILL)
        after = start_workers(store, tmp_path / "logs1", "exec sleep 100")
        try:
            agent.started(after)

            (answer,) = agent.workers.answers()
            found = ask(stores.second_client(store), "status", [0], LONG)
        finally:
            after.close(signal.SIGKILL)

        assert answer.pid == after.pids()[0]
        assert found[0].pid == answer.pid

    def test_store_that_is_not_there(
        self, agent: AgentResponder, tmp_path: Path
    ) -> None:
        """The agent waits for the workers' store, quietly."""
        store = stores.tcp(tmp_path)
        port = store.port
        del store

        class Gone:
            """The store's address."""

        Gone.port = port  # type: ignore[attr-defined]  # only this is read
        processes = start_workers(Gone, tmp_path / "logs", "exec sleep 100")
        try:
            agent.started(processes)
            served = wait_until(lambda: _serve(port))
            found = ask(stores.second_client(served), "status", [0], LONG)
        finally:
            processes.close(signal.SIGKILL)

        assert found[0].source == "its agent"

    def test_disabled(self, agent: AgentResponder, runtime_dir: Path) -> None:
        """With answers off, nothing is read and nothing is started."""
        LOCAL_SOCKET.enable(on=False)
        try:
            agent.started(None)
        finally:
            LOCAL_SOCKET.enable(on=True)

        assert agent.workers.answers() == []
        assert not runtime_dir.exists()

    def test_other_torch(self, agent: AgentResponder) -> None:
        """A torch with another PContext raises, which the patch counts."""
        with pytest.raises(AttributeError):
            agent.started(object())


def _serve(port: int) -> dist.TCPStore | None:
    try:
        return dist.TCPStore(
            "127.0.0.1", port, None, is_master=True, wait_for_workers=False
        )
    except dist.DistNetworkError:  # the port is not free yet
        return None


def test_torchrun(tmp_path: Path) -> None:
    """An unmodified job below tracedstore-run: its ranks and its agent answer.

    Rank 0 waits in init_process_group, rank 1 has ended, rank 2 reads data before it
    creates its store.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    bin_folder = Path(sys.executable).parent
    job = Running(
        tmp_path,
        "torchrun",
        bin_folder / "tracedstore-run",
        *(bin_folder / "torchrun", "--nproc-per-node", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0", script),
        env={"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    try:

        def replies() -> dict[int | None, LocalReply]:
            found = local_processes(LONG).values()
            return {reply.identity.rank: reply for reply in found if reply}

        def settled() -> dict[int | None, LocalReply] | None:
            found = replies()
            if not {None, 0, 2} <= found.keys():
                return None
            rank0, rank2 = found[0].answer, found[2].answer
            assert rank0 is not None
            assert rank2 is not None
            functions = [frame.function for frame in rank2.frames]
            ended = [one.state for one in found[None].workers].count("gone") == 1
            waits = rank0.registered and rank0.operation
            return found if ended and waits and "load_dataset" in functions else None

        found = wait_until(settled)
        host, _, port = found[None].identity.master.rpartition(":")
        connection = dist.TCPStore(host, int(port), None, is_master=False)
        through_store: dict[int, ProcessFacts] = ask(
            connection, "status", range(3), LONG
        )
    finally:
        job.kill()

    assert found[0].identity.same_job(found[None].identity)
    assert through_store[0].operation.startswith("wait default_pg/0//cpu//0/")
    assert through_store[0].registered
    assert (through_store[1].state, through_store[1].detail) == (
        "gone",
        "exited with code 0",
    )
    assert through_store[2].state == "running"
    assert not through_store[2].registered
    assert "load_dataset" in [frame.function for frame in through_store[2].frames]
