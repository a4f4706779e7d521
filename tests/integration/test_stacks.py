"""``tracedstore stacks`` and ``tracedstore status --ask`` on real ranks."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import Script, pause, wait_until
from support.etcd import free_port
from support.fork_server import run_python

pytestmark = pytest.mark.processes

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


# Rank 0 is in a monitored_barrier with rank 3, ranks 1 and 2 are in a barrier with it.
COLLECTIVES = """
import sys, time
import torch.distributed as dist
import tracedstore

def load_dataset():
    time.sleep(150)

port, rank, world_size = map(int, sys.argv[1:])
tracedstore.instrument()
dist.init_process_group(
    "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
)
pair, rest = dist.new_group([0, 3]), dist.new_group([1, 2, 3])
print("ready", file=sys.stderr, flush=True)
if rank == 3:
    load_dataset()
elif rank == 0:
    dist.monitored_barrier(pair)
else:
    dist.barrier(rest)
"""


@pytest.fixture
def port() -> int:
    """The port of the job's store."""
    return free_port()


@pytest.fixture
def job(tmp_path: Path, port: int) -> Iterator[list[Script]]:
    """Ranks 0 and 1 of 3 are busy; rank 2 is not started."""
    ranks: list[Script] = []
    try:
        for rank in (0, 1):
            command = ("-c", RANK, port, rank, 3)
            ranks.append(Script(tmp_path, "rank", *command, env={"RANK": str(rank)}))
            wait_until(lambda: "ready" in ranks[-1].errors())
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def tracedstore(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the job's store."""
    store = f"tcp://127.0.0.1:{port}"
    return run_python("-m", "tracedstore.tools.cli.main", *arguments, "--store", store)


def test_busy_stopped_and_not_started(job: list[Script], port: int) -> None:
    """Each rank is shown as what it is; a silent rank is exit code 2."""
    pause(job[1].pid)

    run = tracedstore(port, "stacks")

    assert run.returncode == 2, run.stdout + run.stderr
    text = " ".join(run.stdout.split())
    assert "rank 0: <string>:8 load_dataset" in text
    assert f"(pid {job[1].pid}): alive, but does not answer: stopped by a" in text
    assert "no answer: rank 2; never registered in this store: 2" in text

    run = tracedstore(port, "stacks", "--json")

    assert run.returncode == 2, run.stderr
    (group,) = json.loads(run.stdout)["groups"]
    states = {one["rank"]: one["state"] for one in group["answers"]}
    assert states == {0: "running", 1: "stopped"}
    assert group["silent_ranks"] == [2]


@pytest.fixture
def collectives(tmp_path: Path, port: int) -> Iterator[list[Script]]:
    """Four ranks, of which three are in collectives and wait for rank 3."""
    ranks: list[Script] = []
    try:
        for rank in range(4):
            command = ("-c", COLLECTIVES, port, rank, 4)
            env = {"RANK": str(rank)}
            ranks.append(Script(tmp_path, f"rank{rank}", *command, env=env))
        for process in ranks:
            wait_until(lambda: "ready" in process.errors())  # noqa: B023 - called in this turn
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def test_hang_in_collectives(collectives: list[Script], port: int) -> None:
    """No Store call shows it: the rank that is not in a collective has a group."""
    # The odd ones first. A title may be two lines.
    titles = re.compile(
        r"rank 0: monitored_barrier of group \S+ at <string>:\d+ \S+, in torch:"
        r" monitored_barrier .*rank 3: <string>:\d+ load_dataset .*"
        r"ranks 1-2: barrier \d+ of group \S+ at <string>:\d+ \S+, in torch: barrier"
    )

    def are_waiting() -> bool:
        run = tracedstore(port, "stacks")
        assert run.returncode == 0, run.stdout + run.stderr
        return titles.match(" ".join(run.stdout.split())) is not None

    wait_until(are_waiting)


def test_status_ask(job: list[Script], port: int) -> None:
    """What unblocked ranks do; those of this host are asked without --ask."""
    answers = json.loads(tracedstore(port, "status", "--ask", "--json").stdout)
    assert [one["rank"] for one in answers["answers"]] == [0, 1]
    text = " ".join(tracedstore(port, "status", "--ask").stdout.split())
    assert "in <string>:8 load_dataset; the same: rank 1" in text
    unasked = json.loads(tracedstore(port, "status", "--json").stdout)["answers"]
    assert [one["rank"] for one in unasked] == [0, 1]


def test_store_that_is_not_there(port: int) -> None:
    """One sentence, and exit code 1."""
    run = tracedstore(port, "stacks")
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert str(port) in run.stderr
