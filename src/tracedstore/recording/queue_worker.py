"""One thread with a bounded queue, for telemetry that its cause must not wait for.

Its users:

- Events and log records. A pipe to a log collector that has stopped reading is full
  after 64 kB, and a write to it blocks without end. A logging handler of the
  application may block as well. So a thread writes, and what does not fit into the
  queue is dropped and counted.
- The span and the event of a completed barrier, which take longer than the barrier
  itself. They are made a moment later: by then the caller goes on, and so do the other
  ranks, which may share its cores.
- The last exports. CPython 3.12 starts no thread while the process ends, so one is
  started before.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from tracedstore.common.errors import TracedStoreError
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.common.threads import DaemonThread
from tracedstore.recording.telemetry import Failures

# Maximum number of pieces of work that wait. What is beyond is dropped.
_MAX_QUEUED = 1024
# Seconds without work after which a thread that delays its work waits to be woken.
# Until then submitting work wakes no thread, which would cost the caller a switch.
_LINGER = 10.0

Work = Callable[[], object]


class _Awaited:
    """A piece of work whose caller waits for it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.done = False

    def __call__(self) -> None:
        try:
            self._work()
        finally:
            self.done = True


class QueueWorker:
    """Does work in the order of its submission, in one daemon thread.

    The thread starts with the first work, and again after it was stopped or refused.

    Args:
        name: The name of the thread.
        part: The part of the telemetry that failures are counted for.
        failures: Where they are counted.
        delay: Seconds between two looks at the queue; 0 to begin at once.
        stuck_after: Seconds after which work that has not ended is a failure.
        counts_drops: Work that is dropped is a failure, too.
        on_start: Is called when a thread has started.

    Attributes:
        dropped: Number of pieces of work that were dropped: the queue was full, or no
            thread could be started.
    """

    def __init__(
        self,
        name: str,
        part: str,
        failures: Failures,
        *,
        delay: float = 0.0,
        stuck_after: float | None = None,
        counts_drops: bool = False,
        on_start: Callable[[], object] | None = None,
    ) -> None:
        self._name = name
        self._part = part
        self._failures = failures
        self._delay = delay
        self._stuck_after = stuck_after
        self._counts_drops = counts_drops
        self._on_start = on_start
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue and no thread, as a forked child must."""
        self.dropped = 0
        self._queue: deque[Work] = deque()
        # Its lock is reentrant: a `__del__` that garbage collection runs may submit.
        self._changed = threading.Condition()
        self._thread: DaemonThread | None = None
        # There is no thread, or it waits to be woken.
        self._parked = True
        # Since when the thread has been with one piece of work, by ``time.monotonic``.
        self._since: float | None = None
        # The same of the work that was last found to be stuck.
        self._stuck_since: float | None = None
        # The thread does not wait out the delay.
        self._hurry = False
        self._stopping = False

    @property
    def is_running(self) -> bool:
        """Whether it has a thread: something was submitted."""
        return self._thread is not None

    @property
    def is_idle(self) -> bool:
        """Whether it has a thread that waits for work."""
        with self._changed:
            return self._thread is not None and self._is_done()

    def start(self) -> bool:
        """Start the thread before there is work; return False if it is refused."""
        return self._thread is not None or off_main_thread(self._wake)

    def submit(self, work: Work, *, wait: float = 0.0) -> None:
        """Do this in the thread. Takes no lock while the thread looks at the queue.

        Args:
            work: The work.
            wait: Seconds to wait until it is done. A thread that has been with one
                piece of work for so long already is not waited for.
        """
        if self._stuck_after is not None:
            self._report_stuck(self._stuck_after)
        if len(self._queue) >= _MAX_QUEUED:
            full = TracedStoreError(f"{_MAX_QUEUED} spans or events wait to be made")
            off_main_thread(self._drop, 1, full)
            return
        awaited = _Awaited(work) if wait else None
        self._queue.append(awaited or work)
        # After the work is in the queue: the thread looks there after it has set this.
        woken = not self._parked or off_main_thread(self._wake)
        if awaited is not None and woken:
            self._wait_for(awaited, wait)

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
        return not self._queue and self._since is None

    def _is_own_thread(self) -> bool:
        # Not current_thread(), which registers a thread of torch's C++ with Python.
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _wait_for(self, awaited: _Awaited, seconds: float) -> None:
        with self._changed:
            since = self._since
            stuck = since is not None and time.monotonic() - since > seconds
            if not stuck and not self._is_own_thread():
                self._changed.wait_for(lambda: awaited.done, seconds)

    def _report_stuck(self, after: float) -> None:
        """Count a failure, once for each piece of work that takes too long."""
        with self._changed:
            since = self._since
            if since is None or since == self._stuck_since:
                return
            if time.monotonic() - since < after:
                return
            self._stuck_since = since
        # Not below the lock: it may emit an event.
        text = f"a write has not ended after {after:g} s"
        self._failures.add(self._part, TimeoutError(text))

    def _drop(self, number: int, reason: Exception) -> None:
        with self._changed:
            self.dropped += number
        if self._counts_drops:
            self._failures.add(self._part, reason)

    def _wake(self) -> bool:
        """Wake the thread, or start it; return False if none can be started."""
        with self._changed:
            refusal = None if self._thread is not None else self._start_thread()
            if refusal is None:
                self._parked = False
                self._changed.notify_all()
                return True
            lost = len(self._queue)
            self._queue.clear()
        self._drop(lost, refusal)
        return False

    def _start_thread(self) -> RuntimeError | None:
        thread = DaemonThread(self._run, name=self._name)
        try:
            thread.start()
        except RuntimeError as error:  # the limit, or the interpreter finalizes
            return error
        self._thread = thread
        if self._on_start is not None:
            self._on_start()
        return None

    def _run(self) -> None:
        while self._wait():
            # A function for each piece of work: this frame refers to none while it
            # waits, and so keeps no store.
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        with self._changed:
            if not self._queue:
                return False
            work = self._queue.popleft()
            self._since = time.monotonic()
        try:
            work()
        except Exception as error:
            self._failures.add(self._part, error)
        with self._changed:
            self._since = None
            self._changed.notify_all()
        return True

    def _wait(self) -> bool:
        """Wait for work; return False to end."""
        with self._changed:
            idle_from = time.monotonic()
            while True:
                if self._delay:
                    self._changed.wait_for(
                        lambda: self._hurry or self._stopping, self._delay
                    )
                self._hurry = False
                if self._queue:
                    return True
                self._changed.notify_all()
                if self._stopping:
                    # First: work that is submitted from now on wakes a new thread. What
                    # was submitted just before has not, and is done by this one.
                    self._parked = True
                    if self._queue:
                        self._parked = False
                        return True
                    self._stopping, self._thread = False, None
                    return False
                if not self._delay or time.monotonic() - idle_from > _LINGER:
                    self._park()

    def _park(self) -> None:
        # Before the queue is looked at, in the wait: see `submit`.
        self._parked = True
        self._changed.wait_for(
            lambda: self._queue or not self._parked or self._hurry or self._stopping
        )
        self._parked = False
