"""Come to the end while a thread of torch's C++ is in a call of the store.

To be run with TORCH_GLOO_LAZY_INIT=1. Argument: bare; or traced, and with a telemetry
that is on, disabled or shut-down.
"""

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import tracedstore
from integration.harness import report, wait_until


def native_threads_in_python() -> set[int]:
    """The threads Python did not start that are in a Python function now."""
    return sys._current_frames().keys() - {t.ident for t in threading.enumerate()}


telemetry = sys.argv[1]
store: dist.Store = dist.HashStore()
if telemetry != "bare":
    tracedstore.configure(disabled=telemetry == "disabled")
    store = tracedstore.wrap(store)
if telemetry == "shut-down":
    tracedstore.shutdown()
dist.init_process_group(
    "cpu:gloo",
    store=store,
    rank=0,
    world_size=2,
    timeout=timedelta(seconds=1),
)
# Nobody else comes.
dist.all_reduce(torch.tensor([1.0]), async_op=True)
if telemetry != "bare":
    wait_until(native_threads_in_python)
report(at_the_end=True)
