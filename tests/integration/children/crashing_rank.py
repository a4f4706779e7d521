"""A rank of a job that does not end well, in the way that its argument names."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def load() -> None:
    """Raise as a program with a mistake does."""
    {"images": 1}["labels"]


_CRASH: dict[str, Callable[[], object]] = {
    "raise": load,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "wait": lambda: threading.Event().wait(),
}


def main(crash: str) -> None:
    """Crash rank 1 after the first step; the others go on to the second one."""
    timeout = 5 if crash == "wait" else 240
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    dist.all_reduce(torch.ones(1))
    sys.stdout.write("step 1 done\n")
    sys.stdout.flush()
    if dist.get_rank() == 1:
        _CRASH[crash]()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(sys.argv[1])
