"""Which threads of a process are those of its rank, by what the main thread does.

Each case is a script of its own: the main thread of pytest is not in a wait.
"""

import subprocess
import sys

import pytest

# The names of the threads that count are printed, when the main thread waits.
_SCRIPT = """
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from queue import Queue

from tracedstore.local.rank_threads import rank_threads


def blocked():
    time.sleep(60)


def start(name, target, *args):
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def work(results):
    blocked()
    results.put(1)


def wait_for(thread):
    thread.join()


def look():
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        waits = frame.f_code.co_filename == threading.__file__
        functions = set()
        while frame is not None:
            functions.add(frame.f_code.co_name)
            frame = frame.f_back
        # The start of a thread is waited for, too.
        if waits and not functions & {"start", "submit", "_adjust_thread_count"}:
            break
        time.sleep(0.01)
    names = {one.ident: one.name for one in threading.enumerate()}
    print(*sorted(names[ident] for ident in rank_threads()), flush=True)
    os._exit(0)


start("listener", blocked)
start("looks", look)
"""

CASES = {
    "join": ("start('worker', blocked).join()", "worker"),
    "join with a timeout": ("start('worker', blocked).join(600)", "worker"),
    "chain": (
        "start('outer', wait_for, start('inner', blocked)).join()",
        "inner outer",
    ),
    "end": ("threading.Thread(target=blocked, name='worker').start()", "worker"),
    "executor": (
        "with ThreadPoolExecutor(1, 'pool') as pool: pool.submit(blocked)",
        "pool_0",
    ),
    "result": ("ThreadPoolExecutor(1, 'pool').submit(blocked).result()", "pool_0"),
    "futures": ("wait([ThreadPoolExecutor(1, 'pool').submit(blocked)])", "pool_0"),
    "first of futures": (
        "list(as_completed([ThreadPoolExecutor(1, 'pool').submit(blocked)]))",
        "pool_0",
    ),
    # Which thread will put something into it is unknown.
    "queue": ("q = Queue(); start('worker', work, q); q.get()", ""),
    "event": ("e = threading.Event(); start('worker', work, e); e.wait()", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_threads_that_the_main_thread_waits_for(case: str) -> None:
    """The main thread, and those that it waits for; never the listener."""
    code, awaited = CASES[case]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT + code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.split() == sorted(["MainThread", *awaited.split()]), done.stderr
