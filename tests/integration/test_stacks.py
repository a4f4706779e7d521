"""``tracedstore stacks`` and ``tracedstore status --ask`` on real ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import Running, pause, wait_until
from support.etcd import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

RANK = """
import sys, time
import torch.distributed as dist
import tracedstore
from tracedstore.coordination import rank_registry

def load_dataset():
    time.sleep(150)

port, rank, world_size = map(int, sys.argv[1:])
tracedstore.configure()
store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
store = tracedstore.wrap(store)
store.set(f"hello/{rank}", "")
rank_registry.register(store, rank, world_size)
print("ready", file=sys.stderr, flush=True)
load_dataset()
"""


@pytest.fixture
def port() -> int:
    """The port of the job's store."""
    return free_port()


@pytest.fixture
def job(tmp_path: Path, port: int) -> Iterator[list[Running]]:
    """Ranks 0 and 1 of 3 are busy; rank 2 is not started."""
    ranks: list[Running] = []
    try:
        for rank in (0, 1):
            command = (sys.executable, "-c", RANK, port, rank, 3)
            ranks.append(Running(tmp_path, "rank", *command, env={"RANK": str(rank)}))
            wait_until(lambda: "ready" in ranks[-1].errors(), 60)
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def tracedstore(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the job's store."""
    store = f"tcp://127.0.0.1:{port}"
    return subprocess.run(
        [Path(sys.executable).parent / "tracedstore", *arguments, "--store", store],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )


def test_busy_stopped_and_not_started(job: list[Running], port: int) -> None:
    """Each rank is shown as what it is; a silent rank is exit code 2."""
    pause(job[1].pid)

    run = tracedstore(port, "stacks")

    assert run.returncode == 2, run.stdout + run.stderr
    text = " ".join(run.stdout.split())
    assert "rank 0: <string>:8 load_dataset" in text
    assert f"(pid {job[1].pid}): alive, but does not answer: stopped by a" in text
    assert "no answer: ranks 2; never registered in this store: 2" in text

    run = tracedstore(port, "stacks", "--json")

    assert run.returncode == 2, run.stderr
    (group,) = json.loads(run.stdout)["groups"]
    states = {one["rank"]: one["state"] for one in group["answers"]}
    assert states == {0: "running", 1: "stopped"}
    assert group["silent_ranks"] == [2]


def test_status_ask(job: list[Running], port: int) -> None:
    """What unblocked ranks do; without --ask no rank is asked."""
    answers = json.loads(tracedstore(port, "status", "--ask", "--json").stdout)
    assert [one["rank"] for one in answers["answers"]] == [0, 1]
    text = " ".join(tracedstore(port, "status", "--ask").stdout.split())
    assert "in <string>:8 load_dataset; the same: rank 1" in text
    assert json.loads(tracedstore(port, "status", "--json").stdout)["answers"] == []


def test_store_that_is_not_there(port: int) -> None:
    """One sentence, and exit code 1."""
    run = tracedstore(port, "stacks")
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert str(port) in run.stderr
