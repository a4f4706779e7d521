"""A rank of a job that does not end well, in the way that its argument names."""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def load() -> None:
    """Raise as a program with a mistake does."""
    {"images": 1}["labels"]


# No stub has the functions of the recorder.
_RECORDER = importlib.import_module("torch._C._distributed_c10d")


def write_dump() -> None:
    """Write the dump of this rank, as NCCL's watchdog and the debug server do."""
    path = dump_path(dist.get_rank())
    # Moved there, because the other rank may read it at once.
    path.with_suffix(".tmp").write_bytes(_RECORDER._dump_fr_trace())
    path.with_suffix(".tmp").rename(path)


def dump_path(rank: int) -> Path:
    """Return the file of a rank, by torch's variable."""
    return Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}")


def dump_and_wait() -> None:
    """Write a dump when the other rank has, and wait."""
    while not dump_path(0).exists():
        time.sleep(0.02)
    write_dump()
    threading.Event().wait()


def dump_in_second_step() -> None:
    """Write a dump while this rank waits in its second call, and end the job."""
    while b'"collective_seq_id":2' not in _RECORDER._dump_fr_trace_json():
        time.sleep(0.02)
    write_dump()
    while not dump_path(1).exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


_CRASH: dict[str, Callable[[], object]] = {
    "raise": load,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "wait": lambda: threading.Event().wait(),
    "dump": dump_and_wait,
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
    if crash == "dump":
        threading.Thread(target=dump_in_second_step, daemon=True).start()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(sys.argv[1])
