"""The watcher: one thread a process that looks after calls that last too long.

A histogram counts a wait when it ends. The waits of a hung job do not end, so the
watcher reports them while they last: Store calls in flight (`signals.inflight`),
barriers (`coordination.barrier`) and rendezvous (`rendezvous.handlers`).
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from tracedstore.common.threads import DaemonThread
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import Failures

# The thread does not wait, or there is none: whatever is added has to wake it.
_NOT_WAITING = float("inf")


class Watched(Protocol):
    """A wait that the watcher reports while it lasts.

    Attributes:
        observer: The part of the telemetry that a failure is counted for.
        started: When the wait began, by ``time.monotonic``.
        due: When to report next.
    """

    observer: str
    started: float
    due: float

    @property
    def report(self) -> Callable[[], float | None]:
        """Reports it, in the watcher's thread.

        Returns the seconds until the next report, or None for when the wait has
        doubled. It bounds its own duration: the other watches wait for it.
        """


class Watch:
    """A wait with a function that reports it.

    Args:
        observer: The part of the telemetry that a failure is counted for.
        report: Reports it; see `Watched`.
        after: Seconds from the start to the first report.

    Attributes:
        after: The same.
        started: When the wait began, by ``time.monotonic``.
        due: When to report next.
    """

    __slots__ = ("after", "due", "observer", "report", "started")

    def __init__(
        self, observer: str, report: Callable[[], float | None], after: float
    ) -> None:
        self.observer = observer
        self.report = report
        self.after = after
        self.started = time.monotonic()
        self.due = self.started + after


class Watcher:
    """Reports watches when they are due, in one daemon thread.

    The thread starts with the first watch. It ends when it has had none for a while.

    Attributes:
        watches: What it reports. A barrier adds itself, and calls `wake` if it is due
            before the thread looks: a function less.
        looks_at: When the thread looks at the watches next, by ``time.monotonic``.
    """

    # Seconds that the idle thread stays for the next watch: a job has many barriers.
    _LINGER = 10.0

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self.reset()

    def reset(self) -> None:
        """Drop all watches and the thread: a forked child has not the thread."""
        self.watches: set[Watched] = set()
        self.looks_at = _NOT_WAITING
        self._changed = threading.Condition()
        self._thread: DaemonThread | None = None
        self._stopping = False

    def add(self, watch: Watched) -> None:
        """Report a watch when it is due, until it is removed.

        Raises:
            RuntimeError: No thread can be started.
        """
        self.watches.add(watch)
        # Else it looks in time. To wake it costs the caller a switch to another thread.
        if watch.due < self.looks_at:
            try:
                self.wake()
            except RuntimeError:
                self.watches.discard(watch)
                raise

    def remove(self, watch: Watched) -> None:
        """Report a watch no more. A report under way is not waited for."""
        self.watches.discard(watch)

    def wake(self) -> None:
        """Let the thread look at the watches now; start it if there is none.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._changed:
            if self._thread is None:
                thread = DaemonThread(self._run, name="tracedstore-watcher")
                thread.start()
                self._thread = thread
            self._stopping = False
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """Drop all watches and end the thread, within the timeout."""
        self.watches.clear()
        self.stop_if_idle(timeout)

    def stop_if_idle(self, timeout: float) -> None:
        """End the thread if it has no watch; wait for that within the timeout."""
        with self._changed:
            thread = self._thread
            if self.watches or thread is None:
                return
            self._stopping = True
            self._changed.notify()
        if thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while (due := self._wait_for_due()) is not None:
            # Taken from the list: this frame refers to none of them while it waits.
            while due:
                self._report(due.pop(0))

    def _report(self, watch: Watched) -> None:
        delay = None
        try:
            delay = watch.report()
        except Exception as error:
            self._failures.add(watch.observer, error)
        now = time.monotonic()
        watch.due = now + (now - watch.started if delay is None else delay)

    def _wait_for_due(self) -> list[Watched] | None:
        """Wait until watches are due; return None after a while without any."""
        expired = False
        with self._changed:
            while True:
                # Before the watches are read: one that is added from now on calls
                # `wake`, which waits for the lock.
                self.looks_at = _NOT_WAITING
                now = time.monotonic()
                watches = list(self.watches)
                due = [watch for watch in watches if watch.due <= now]
                if due:
                    return sorted(due, key=lambda watch: watch.due)
                idle = not watches
                ends = idle and (expired or self._stopping)
                self._stopping = False
                if ends:
                    self._thread = None
                    return None
                delay = min((w.due - now for w in watches), default=self._LINGER)
                self.looks_at = now + delay
                # A watch that is removed meanwhile is freed, and its store with it.
                del watches
                expired = not self._changed.wait(delay) and idle


# One a process: a thread for each store or barrier would cost more than it watches.
WATCHER: Final = Watcher(RECORDER.failures)
