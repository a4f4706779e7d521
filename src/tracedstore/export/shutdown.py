"""What a process waits for before it ends, in bounded time."""

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from tracedstore import names
from tracedstore.core import store_proxy
from tracedstore.core.counters import thread_names
from tracedstore.core.recorder import RECORDER
from tracedstore.core.timeouts import run_with_timeout

# Seconds; only where a thread of torch's C++ is in a Store call at exit. Such a call
# ends by its store's timeout, which is this long by torch's default.
_MAX_WAIT_AT_EXIT = 1800.0
# Seconds that C++ gets after such a call to release Python objects, an exception
# mostly, or to make its next call.
_SETTLE_AT_EXIT = 0.5


def export_with_timeout(export: Callable[[float], None], timeout: float) -> None:
    """Run an export; return after the timeout even where the exporter ignores it."""
    with suppress(TimeoutError):
        run_with_timeout(
            timeout,
            lambda: RECORDER.failures.guarded(names.SPANS, export, timeout),
        )


def wait_for_native_calls() -> None:
    """Wait until no thread of torch's C++ is in a Store call.

    Such a call returns through Python. If that happens while the interpreter
    finalizes, CPython before 3.14 ends the thread in a way that makes C++ abort. The
    bare store has no such problem, so the job must not have one.
    """
    deadline = time.monotonic() + _MAX_WAIT_AT_EXIT
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
