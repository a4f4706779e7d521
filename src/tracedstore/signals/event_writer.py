"""Writes events in a thread, so that a log that blocks does not block the job.

A pipe to a log collector that has stopped reading is full after 64 kB, and a write to
it blocks without end. A logging handler of the application may block as well. So events
go through a bounded queue and a writer thread. An event that does not fit is dropped
and counted.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from tracedstore import names
from tracedstore.common.threads import DaemonThread
from tracedstore.recording.observer import Failures

# Maximum number of events that wait to be written.
_MAX_QUEUED = 1024
# Seconds that the caller of `submit` waits for its event to be written.
_WAIT_TIMEOUT = 0.2

Write = Callable[[], None]


class EventWriter:
    """Runs writes in order, in one daemon thread.

    Args:
        failures: Where writes that fail are counted.
        part: The part of the telemetry that they are counted for.
        stuck_after: Seconds after which a write that has not ended is a failure.

    Attributes:
        dropped: Number of events that were dropped because the queue was full.
    """

    def __init__(
        self,
        failures: Failures,
        *,
        part: str = names.EVENTS,
        stuck_after: float = math.inf,
    ) -> None:
        self._failures = failures
        self._part = part
        self._stuck_after = stuck_after
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue and no thread, as a forked child must."""
        self.dropped = 0
        self._changed = threading.Condition()
        self._queue: deque[Write] = deque()
        # Numbers of events that were queued and that were written.
        self._submitted = self._written = 0
        # When the write in progress began, by ``time.monotonic``.
        self._writing_since: float | None = None
        # The same of the write that was last found to be stuck.
        self._stuck_since: float | None = None
        self._thread: DaemonThread | None = None
        self._stopping = False

    @property
    def is_running(self) -> bool:
        """Whether it has a thread: something was submitted."""
        return self._thread is not None

    def submit(self, write: Write, *, wait: bool) -> None:
        """Queue a write.

        Args:
            write: Writes one event.
            wait: Return when it is written, after 0.2 s at the latest. A writer that
                has been stuck for so long already is not waited for.
        """
        if self._is_stuck():
            stuck = f"a write has not ended after {self._stuck_after:g} s"
            self._failures.add(self._part, TimeoutError(stuck))
        with self._changed:
            if len(self._queue) >= _MAX_QUEUED or not self._ensure_thread():
                self.dropped += 1
                return
            self._queue.append(write)
            self._submitted += 1
            number = self._submitted
            self._changed.notify_all()
            if wait and not self._is_own_thread():
                self._wait_until_written(number, self._wait_timeout())

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; return False after the timeout."""
        with self._changed:
            if self._thread is None or self._is_own_thread():
                return True
            return self._wait_until_written(self._submitted, timeout)

    def stop(self, timeout: float) -> None:
        """Write what is queued and end the thread, within the timeout."""
        with self._changed:
            thread = self._thread
            self._stopping = True
            self._changed.notify_all()
        if thread is not None and not self._is_own_thread():
            thread.join(timeout)

    def _is_own_thread(self) -> bool:
        # Not current_thread(), which registers a thread of torch's C++ with Python.
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _is_stuck(self) -> bool:
        """Return once for each write whether it takes too long."""
        with self._changed:
            since = self._writing_since
            if since is None or since == self._stuck_since:
                return False
            if time.monotonic() - since < self._stuck_after:
                return False
            self._stuck_since = since
            return True

    def _wait_timeout(self) -> float:
        since = self._writing_since
        stuck = since is not None and time.monotonic() - since > _WAIT_TIMEOUT
        return 0.0 if stuck else _WAIT_TIMEOUT

    def _wait_until_written(self, number: int, timeout: float) -> bool:
        return self._changed.wait_for(lambda: self._written >= number, timeout)

    def _ensure_thread(self) -> bool:
        if self._thread is not None:
            return True
        thread = DaemonThread(self._run, name=f"tracedstore-{self._part}-writer")
        try:
            thread.start()
        except RuntimeError:  # the limit is reached, or the interpreter finalizes
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (write := self._next()) is not None:
            try:
                write()
            except Exception as error:
                self._failures.add(self._part, error)
            with self._changed:
                self._written += 1
                self._writing_since = None
                self._changed.notify_all()

    def _next(self) -> Write | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if not self._queue:
                self._thread = None
                self._stopping = False
                return None
            self._writing_since = time.monotonic()
            return self._queue.popleft()
