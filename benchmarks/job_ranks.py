"""A job of real ranks for benchmarks/job_traffic.py: its requests and log lines.

Each rank is a process, forked from one that has imported torch. They use a TCPStore
through a relay that counts. The job starts, is idle, passes barriers, waits in one
for a rank that stays away, and hangs in ``new_group`` without that rank.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from log_lines import LogLines
from store_requests import CountingRelay

from tracedstore import BarrierTimeout, barrier, configure, instrument

BARRIERS = 10


class Job:
    """The ranks of a job."""

    def __init__(
        self, pipes: "list[Connection[Any, Any]]", relay: CountingRelay
    ) -> None:
        self._pipes = pipes
        self._relay = relay
        # When each phase began, in seconds since the epoch.
        self.began: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self._relay.begin(phase)
        self.began[phase] = time.time()

    def run(self, step: str, *arguments: Any, absent: int = 0) -> None:
        """Let the ranks take a step and wait for them; the last ones stay away."""
        self.send(step, *arguments, absent=absent)
        for pipe in self._present(absent):
            pipe.recv()

    def send(self, step: str, *arguments: Any, absent: int = 0) -> None:
        """Let the ranks take a step; the last ones stay away."""
        for pipe in self._present(absent):
            pipe.send((step, arguments))

    def _present(self, absent: int) -> "list[Connection[Any, Any]]":
        return self._pipes[: len(self._pipes) - absent]


def measure(
    relay: CountingRelay,
    folder: Path,
    ranks: int,
    *,
    idle: float,
    barrier_timeout: float,
    hang: float,
) -> dict[str, Any]:
    """Run the job; return its requests and its log lines by phase.

    Args:
        relay: The way to the store.
        folder: Where the ranks write their logs.
        ranks: The number of ranks.
        idle: Seconds in which the ranks do nothing.
        barrier_timeout: Seconds that the ranks wait in barriers.
        hang: Seconds that they hang.
    """
    with _ranks(relay, folder, ranks) as job:
        job.begin("start")
        job.run("start")
        job.begin("idle")
        time.sleep(idle)
        job.begin("barriers")
        for number in range(BARRIERS):
            job.run("barrier", f"completed/{number}", 60.0)
        job.begin("stalled barrier")
        job.run("barrier", "stalled", barrier_timeout, absent=1)
        job.begin("hang")
        job.send("new_group", absent=1)
        time.sleep(hang)
        job.begin("end")
    requests = relay.requests()
    lines = LogLines()
    for log in folder.glob("*.log"):
        for line in log.read_text("utf-8", "replace").splitlines(keepends=True):
            lines.add(line)
    phases = list(job.began)
    return {
        phase: {
            "seconds": job.began[after] - job.began[phase],
            "barriers": BARRIERS if phase == "barriers" else 0,
            "requests": requests.summary(phase),
            "log": lines.summary(job.began[phase], job.began[after]),
        }
        for phase, after in pairwise(phases)
    }


@contextmanager
def _ranks(relay: CountingRelay, folder: Path, number: int) -> Iterator[Job]:
    """Start the processes of the ranks."""
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for rank in range(number):
            pipe, other_end = fork.Pipe()
            process = fork.Process(
                target=_run_rank,
                args=(other_end, relay.port, rank, number, folder / f"{rank}.log"),
                daemon=True,
            )
            process.start()
            pipes.append(pipe)
            processes.append(process)
        yield Job(pipes, relay)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _run_rank(
    pipe: "Connection[Any, Any]", port: int, rank: int, number: int, log: Path
) -> None:
    """Take the steps that a pipe asks for, with the default settings."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(number),
        LOCAL_WORLD_SIZE=str(number),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves no store
        TRACEDSTORE_RUN_ID="benchmark",
    )
    instrument()
    configure(log_format="json")
    while True:
        step, arguments = pipe.recv()
        if step == "start":
            dist.init_process_group("gloo")
        elif step == "barrier":
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other
            prefix, timeout = arguments
            with suppress(BarrierTimeout):
                barrier(store, number, prefix, timeout, rank=rank)
        else:
            dist.new_group(backend="gloo")
        pipe.send(step)
