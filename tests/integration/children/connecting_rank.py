"""A rank that creates its process group; it reports how that ended.

Arguments: init method, rank, world size (empty: from the environment), and the timeout
in seconds.
"""

import sys
import time
from datetime import timedelta

import torch.distributed as dist

import tracedstore
from integration.harness import report

url, rank, world_size, timeout = sys.argv[1:5]
numbers = {"rank": int(rank), "world_size": int(world_size)} if rank else {}
tracedstore.instrument()
report(state="connecting")
started = time.monotonic()
try:
    dist.init_process_group(
        "gloo", url, timeout=timedelta(seconds=float(timeout)), **numbers
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
    dist.barrier()
    dist.destroy_process_group()
