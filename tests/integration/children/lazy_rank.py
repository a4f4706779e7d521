"""One of two ranks whose gloo connects at its first use, from a native thread.

Needs TORCH_GLOO_LAZY_INIT=1. Arguments: rank, the server's port.
"""

import sys
import threading
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import operation_counts, report, wait_until
from tracedstore.recording.recorder import RECORDER

rank, port = int(sys.argv[1]), int(sys.argv[2])
tracedstore.configure(stall_after=0.2)
dist.init_process_group(
    "cpu:gloo",
    store=tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False)),
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=60),
)
number = torch.tensor([rank + 1.0])
work = dist.all_reduce(number, async_op=True)
if rank == 0:
    # The test starts the other rank after this report.
    report(in_flight=[asdict(call) for call in wait_until(tracedstore.in_flight)])
work.wait()
report(
    sum=number.item(),
    native_threads=len(
        RECORDER.counters.keys() - {thread.ident for thread in threading.enumerate()}
    ),
    counted=operation_counts(REGISTRY),
    in_flight=len(tracedstore.in_flight()),
)
