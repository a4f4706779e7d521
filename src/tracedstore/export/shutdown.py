"""What a process waits for before it ends, in bounded time."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import torch.distributed as dist

from tracedstore import names
from tracedstore.common.threads import DaemonThread
from tracedstore.common.timeouts import countdown, start_bounded_thread
from tracedstore.recording import store_proxy
from tracedstore.recording.counters import thread_names
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import RECORDER

# Seconds; only where a thread of a process group is in a Store call at exit. Such a
# call ends by its store's timeout, which is this long by torch's default.
_MAX_WAIT_AT_EXIT = 1800.0
# Seconds that C++ gets after such a call to release Python objects, an exception
# mostly, or to make its next call.
_SETTLE_AT_EXIT = 0.5


# It is started early: CPython 3.12 starts no thread while the process ends, when the
# last spans, metrics and log records are exported.
SPARE_THREAD: Final = QueueWorker(
    "tracedstore-spare", names.OTEL_METRICS, RECORDER.failures, counts_drops=True
)


def export_with_timeout(
    timeout: float, exports: Mapping[str, Callable[[], object]]
) -> None:
    """Run exports, each in a thread; return after the timeout whatever they do.

    If no thread can be started, the spare one runs them one after the other, unless it
    is still in an earlier one.

    Args:
        timeout: Seconds for all of them.
        exports: The exports, by the part of the telemetry that a failure is counted
            for.
    """
    left = countdown(timeout)
    threads: list[DaemonThread] = []
    unstarted: list[Callable[[], object]] = []
    for part, export in exports.items():
        guarded = partial(RECORDER.failures.guarded, part, export)
        try:
            threads.append(start_bounded_thread(guarded))
        except RuntimeError:
            unstarted.append(guarded)
    if unstarted and SPARE_THREAD.is_idle:
        SPARE_THREAD.submit(partial(_run_all, unstarted), wait=left())
    for thread in threads:
        thread.join(left())


def _run_all(exports: Iterable[Callable[[], object]]) -> None:
    for export in exports:
        export()


def wait_for_native_calls(timeout: float) -> None:
    """Wait until no thread that Python did not start is in a call of the Python base.

    Such a call returns through Python. If that happens while the interpreter
    finalizes, CPython before 3.14 ends the thread in a way that makes C++ abort.
    torch waits for the threads of a process group when that is freed, with a bare
    store too, so their calls are waited for until they end. Other threads are not
    waited for with a bare store, so the wait for theirs is bounded.

    Args:
        timeout: Seconds to wait where there is no process group.
    """
    limit = _MAX_WAIT_AT_EXIT if dist.is_initialized() else timeout
    deadline = time.monotonic() + limit
    last_seen = None
    while (now := time.monotonic()) < deadline:
        if _in_native_call():
            last_seen = now
        elif last_seen is None or now - last_seen > _SETTLE_AT_EXIT:
            return
        time.sleep(0.01)


def _in_native_call() -> bool:
    """Return whether a thread that Python did not start is in a Store call.

    It has Python frames only during a call, whether the call is recorded or not.
    """
    known = thread_names()
    return any(
        frame.f_code.co_filename == store_proxy.__file__
        for thread_id, innermost in sys._current_frames().items()  # noqa: SLF001
        if thread_id not in known
        for frame, _ in traceback.walk_stack(innermost)
    )
