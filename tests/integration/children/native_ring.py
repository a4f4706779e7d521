"""A thread of torch's C++ is blocked in a call of a store of the native base.

Needs TORCH_GLOO_LAZY_INIT=1 and TRACEDSTORE_CORE=native. Argument: "exit" to exit
during the call, "wait" to wait for its timeout.
"""

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import operation_counts, report, wait_until
from tracedstore.testing import OperationLog

log = OperationLog()
tracedstore.configure(observers=[log], log_format="off")
dist.init_process_group(
    "cpu:gloo",
    store=tracedstore.wrap(dist.HashStore()),
    rank=0,
    world_size=2,
    timeout=timedelta(seconds=1),
)
# The other rank never starts.
work = dist.all_reduce(torch.tensor([1.0]), async_op=True)
(call,) = wait_until(tracedstore.in_flight)
if sys.argv[1] == "wait":
    try:
        work.wait()
    except RuntimeError as error:
        caught = type(error).__name__
    wait_until(lambda: not tracedstore.in_flight())
    known = {thread.ident for thread in threading.enumerate()}
    counted = operation_counts(REGISTRY)["hash_store.wait"]
    # Whichever thread reads the ring first notifies the observers.
    observed = wait_until(
        lambda: [
            (operation.method.name, operation.error_type)
            for operation in log.operations
            if operation.thread_id not in known
        ]
    )
    report(thread=call.thread, caught=caught, counted=counted, observed=observed)
else:
    report(thread=call.thread)
