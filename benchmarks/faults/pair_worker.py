"""The worker of a job of `pairs`: steps of a gloo group, and one seeded fault.

It is run by torchrun, bare or traced, and does not import tracedstore. What happens is
written to a file as lines of JSON, with the monotonic clock of the machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

# Seconds that a stopped process is stopped, and that a slow worker sleeps.
_PAUSE = 1.0
# gloo waits five times as long for a rank to connect.
_GROUP_TIMEOUT = timedelta(seconds=3)


def mark(kind: str, **fields: Any) -> None:
    """Append a line to the file of the job, in one write."""
    line = {"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **fields}
    file = os.open(os.environ["FAULTS_MARKS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def started_at() -> float:
    """Return when this process was created, by the monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") - boot


def is_traced(dist: Any) -> bool:
    """Return whether the store of the group, below its prefixes, is a traced one."""
    store: Any = vars(dist.distributed_c10d)["_get_default_store"]()
    while type(store) is dist.PrefixStore:
        store = store.underlying_store
    return type(store).__module__.startswith("tracedstore")


def fail(fault: str) -> None:
    """Let the fault happen: to this worker, or to the agent above it."""
    mark("fault", fault=fault)
    action, _, target = fault.partition(" ")
    pid = os.getppid() if target == "agent" else os.getpid()
    if action == "kill":
        os.kill(pid, signal.SIGKILL)
    elif action == "terminate":
        os.kill(pid, signal.SIGTERM)
    elif action == "stop":
        # Another process resumes it. It is no child of the worker's session.
        subprocess.Popen(
            ["sh", "-c", f"sleep {_PAUSE}; kill -CONT {pid}"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.kill(pid, signal.SIGSTOP)
    elif action == "raise":
        raise ValueError("the fault of this job")
    elif action == "slow":
        time.sleep(_PAUSE)


def main() -> None:
    """Run the steps of one worker."""
    fault, rank, step, steps = sys.argv[1], *map(int, sys.argv[2:5])
    mark("start", created=started_at())
    import torch  # noqa: PLC0415 - the time of its import is of interest
    import torch.distributed as dist  # noqa: PLC0415

    mark("imported")
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mark("group", rank=dist.get_rank(), attempt=attempt, traced=is_traced(dist))
    # A rank may be of another agent after a restart, so the fault happens once a job.
    once = Path(os.environ["FAULTS_MARKS"]).with_suffix(".once")
    for number in range(steps):
        if dist.get_rank() == rank and number == step:
            with suppress(FileExistsError):
                once.touch(exist_ok=False)
                fail(fault)
        dist.all_reduce(torch.ones(1))
    mark("steps")
    dist.destroy_process_group()
    mark("end")


if __name__ == "__main__":
    main()
