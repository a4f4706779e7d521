"""No lock of this package is taken in the main thread on the way of a call.

A signal handler may run there at any time and use a traced store. It would wait for a
lock that the interrupted code holds, for ever.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tracedstore

_PACKAGE = Path(tracedstore.__file__).parent

# Lists the locks of this package that the main thread takes, by the lines that take
# them. Blocking ones only: taking a lock if it is free cannot deadlock.
_CHILD = """
import json, os, sys, threading, _thread
from datetime import timedelta

package, core = sys.argv[1:]
taken = set()
main = threading.main_thread().ident

def note():
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("/threading.py"):
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    if _thread.get_ident() == main and name.startswith(package):
        taken.add(f"{name[len(package) + 1:]} {frame.f_code.co_name}")

class Noted:
    def __init__(self, lock):
        self._lock = lock
    def acquire(self, blocking=True, timeout=-1):
        if blocking:
            note()
        return self._lock.acquire(blocking, timeout)
    def __enter__(self):
        note()
        return self._lock.__enter__()
    def __exit__(self, *args):
        return self._lock.__exit__(*args)
    def __getattr__(self, name):
        return getattr(self._lock, name)

lock, rlock = threading.Lock, threading.RLock
threading.Lock = lambda: Noted(lock())
threading.RLock = lambda: Noted(rlock())

from torch.distributed import DistStoreError, HashStore, TCPStore
import torch.distributed as dist
import tracedstore
from opentelemetry.sdk.trace import TracerProvider

tracedstore.instrument()
tracedstore.configure(core=core, tracer_provider=TracerProvider(), spans="all",
                      slow_after=0, log_format="json")
server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
for store in (tracedstore.wrap(HashStore()), tracedstore.wrap(server)):
    for number in range(600):
        store.set("key", "value")
        store.compare_set("key", "other", "value")
        tracedstore.barrier(store, 1, f"barrier/{number}", 10, rank=0)
    try:
        store.wait(["missing"], timedelta(milliseconds=10))
    except DistStoreError:
        pass
    try:
        tracedstore.barrier(store, 2, "late", 0.05, rank=0)
    except tracedstore.BarrierTimeout:
        pass
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.new_group([0])
dist.destroy_process_group()
print(json.dumps(sorted(taken)), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("core", ["python", "native"])
def test_locks_of_the_main_thread(core: str) -> None:
    """Calls, failing waits, barriers, constructors and groups take none."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD, str(_PACKAGE), core],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_list_of_locks_sees_one() -> None:
    """The child of the test above lists a lock that is taken."""
    child = _CHILD.replace(
        "tracedstore.instrument()",
        "from tracedstore.export import setup\nsetup._set_identity(0, 1)",
    )

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child, str(_PACKAGE), "python"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert json.loads(done.stdout) == ["export/setup.py _set_identity"]
