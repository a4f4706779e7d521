"""Work that waits until the call which caused it has returned.

The span and the event of a completed barrier take longer than the barrier itself. They
are made in a thread, a moment later: by then the caller goes on, and so do the other
ranks, which may share its cores.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable

from tracedstore.common.errors import TracedStoreError
from tracedstore.common.threads import DaemonThread
from tracedstore.recording.observer import Failures

# Maximum number of pieces of work that wait. What is beyond counts as a failure.
_MAX_QUEUED = 1024
# Seconds between two looks at the queue.
_DELAY = 0.1
# Seconds without work after which the thread waits to be woken. Until then submitting
# work wakes no thread, which would cost the caller a switch.
_LINGER = 10.0

# Seconds for what is queued when the process ends.
_EXIT_TIMEOUT = 1.0

Work = Callable[[], object]


class DeferredWork:
    """Does work in the order of its submission, in one daemon thread.

    Args:
        observer: The part of the telemetry that failures are counted for.
        failures: Where they are counted.
    """

    def __init__(self, observer: str, failures: Failures) -> None:
        self._observer = observer
        self._failures = failures
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue and no thread, as a forked child must."""
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._thread: DaemonThread | None = None
        # There is no thread, or it waits to be woken.
        self._parked = True
        self._working = False
        # The thread does not wait out the delay.
        self._hurry = False
        self._stopping = False

    def submit(self, work: Work) -> None:
        """Do this later; count a failure if the queue is full or there is no thread."""
        if len(self._queue) >= _MAX_QUEUED:
            text = f"{_MAX_QUEUED} spans and events wait to be made"
            self._failures.add(self._observer, TracedStoreError(text))
            return
        self._queue.append(work)
        # After the work is in the queue: the thread looks there after it has set this.
        if self._parked:
            self._failures.guarded(self._observer, self._wake)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty; return False after the timeout."""
        with self._changed:
            if self._thread is None or self._is_own_thread():
                return True
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(self._is_done, timeout)

    def stop(self, timeout: float) -> None:
        """Do what is queued and end the thread, within the timeout."""
        with self._changed:
            thread = self._thread
            self._stopping = thread is not None
            self._changed.notify_all()
        if thread is not None and not self._is_own_thread():
            thread.join(timeout)

    def _is_done(self) -> bool:
        return not self._queue and not self._working

    def _is_own_thread(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None:
                thread = DaemonThread(self._run, name="tracedstore-deferred")
                try:
                    thread.start()
                except RuntimeError:
                    self._queue.clear()
                    raise
                self._thread = thread
                # Now, because hooks run in reverse order: there is a tracer provider by
                # now, and its own hook drops every later span.
                atexit.unregister(self.flush)
                atexit.register(self.flush, _EXIT_TIMEOUT)
            self._parked = False
            self._changed.notify_all()

    def _run(self) -> None:
        while self._wait():
            while self._queue:
                try:
                    self._queue.popleft()()
                except Exception as error:
                    self._failures.add(self._observer, error)
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for work; return False to end."""
        with self._changed:
            idle_from = time.monotonic()
            while True:
                self._changed.wait_for(lambda: self._hurry or self._stopping, _DELAY)
                self._hurry = False
                if self._queue:
                    self._working = True
                    return True
                self._changed.notify_all()
                if self._stopping:
                    # First: work that is submitted from now on wakes a new thread. What
                    # was submitted just before has not, and is done by this one.
                    self._parked = True
                    if self._queue:
                        self._parked = False
                        continue
                    self._stopping, self._thread = False, None
                    return False
                if time.monotonic() - idle_from > _LINGER:
                    self._park()

    def _park(self) -> None:
        self._parked = True
        self._changed.wait_for(
            lambda: self._queue or not self._parked or self._hurry or self._stopping
        )
        self._parked = False
