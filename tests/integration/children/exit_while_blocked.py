"""Exit while a thread of torch's C++ is in a call of the store.

Needs TORCH_GLOO_LAZY_INIT=1. Argument: "bare" for a bare store; "on", "disabled" or
"shut-down" for a traced store with the telemetry in that state.
"""

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import tracedstore
from integration.harness import report, wait_until


def native_threads_in_python() -> set[int]:
    """Return the threads not started by Python that run a Python function now."""
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
# The other rank never starts.
dist.all_reduce(torch.tensor([1.0]), async_op=True)
if telemetry != "bare":
    wait_until(native_threads_in_python)
report(at_the_end=True)
