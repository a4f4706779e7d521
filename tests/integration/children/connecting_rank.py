"""A rank that creates its process group; it reports how that ended.

Arguments: init method, rank, world size, timeout in seconds.
"""

import sys
import time
from datetime import timedelta

import torch.distributed as dist

import tracedstore
from integration.harness import report

url, rank, world_size, timeout = sys.argv[1:5]
tracedstore.instrument()
report(state="connecting")
started = time.monotonic()
try:
    dist.init_process_group(
        "gloo",
        url,
        timeout=timedelta(seconds=float(timeout)),
        rank=int(rank),
        world_size=int(world_size),
    )
except Exception as error:
    report(
        state="failed",
        type=type(error).__name__,
        text=str(error),
        args=[str(arg) for arg in error.args],
        notes=getattr(error, "__notes__", []),
        seconds=time.monotonic() - started,
    )
else:
    report(state="connected", seconds=time.monotonic() - started)
    sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()
