"""What has to be done before a process may end, in bounded time."""

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

# Seconds; only where a thread of torch's C++ is in a call at the very end. Such a call
# ends by its store's timeout, which torch sets to this by default.
_LONGEST_WAIT_AT_EXIT = 1800.0
# Seconds that C++ gets after such a call to drop what it holds of Python's, an
# exception mostly, or to make its next one.
_QUIET_AT_EXIT = 0.5


def in_time(export: Callable[[float], None], timeout: float) -> None:
    """Export, for so long at most: exporters do not always end when told to."""
    with suppress(TimeoutError):
        run_with_timeout(timeout, lambda: _safely(export, timeout))


def _safely(export: Callable[[float], None], timeout: float) -> None:
    try:
        export(timeout)
    except Exception as error:
        RECORDER.failures.add(names.SPANS, error)


def let_native_calls_end() -> None:
    """Wait for calls that torch's own threads are in, as long as those take.

    A call from C++ returns through Python. When that happens while the interpreter
    is being torn down, CPython before 3.14 ends the thread in a way that C++ answers
    with abort(). The bare store knows nothing of that, so neither shall the job.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_AT_EXIT
    last_seen = None
    while (now := time.monotonic()) < deadline:
        if _in_native_call():
            last_seen = now
        elif last_seen is None or now - last_seen > _QUIET_AT_EXIT:
            return
        time.sleep(0.01)


def _in_native_call() -> bool:
    """Tell whether a thread that Python did not start is in a call of a store.

    Its frames tell, recorded or not; a thread of C++ has some only during a call.
    """
    known = thread_names()
    return any(
        frame.f_code.co_filename == store_proxy.__file__
        for thread_id, innermost in sys._current_frames().items()  # noqa: SLF001
        if thread_id not in known
        for frame, _ in traceback.walk_stack(innermost)
    )
