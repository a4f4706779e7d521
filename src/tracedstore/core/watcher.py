"""The watcher: one thread a process that looks after calls that last too long.

A histogram counts a wait when it ends. The waits of a hung job do not end, so the
watcher reports them while they last: Store calls in flight (`signals.inflight`),
barriers (`coordination.barrier`) and rendezvous (`rendezvous.handlers`).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tracedstore.core.observer import Failures
from tracedstore.core.recorder import RECORDER
from tracedstore.core.threads import DaemonThread


@dataclass(slots=True, eq=False)
class Watch:
    """A wait that the watcher reports while it lasts.

    Attributes:
        observer: The part of the telemetry that a failure is counted for.
        report: Reports it, in the watcher's thread. Returns the seconds until the next
            report, or None for when the wait has doubled. It bounds its own duration:
            the other watches wait for it.
        after: Seconds from the start to the first report.
        started: When the wait began, by ``time.monotonic``.
        due: When to report next.
    """

    observer: str
    report: Callable[[], float | None]
    after: float
    started: float = field(default_factory=time.monotonic)
    due: float = field(init=False)

    def __post_init__(self) -> None:
        self.due = self.started + self.after


class Watcher:
    """Reports watches when they are due, in one daemon thread.

    The thread starts with the first watch. It ends when it has had none for a while.
    """

    # Seconds that the idle thread stays for the next watch: a job has many barriers.
    _LINGER = 10.0

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self.reset()

    def reset(self) -> None:
        """Drop all watches and the thread: a forked child has not the thread."""
        self._changed = threading.Condition()
        self._watches: set[Watch] = set()
        self._thread: DaemonThread | None = None
        self._stopping = False

    def add(self, watch: Watch) -> None:
        """Report a watch when it is due, until it is removed.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._changed:
            self._watches.add(watch)
            if self._thread is not None:
                self._stopping = False
                self._changed.notify()
                return
            thread = DaemonThread(self._run, name="tracedstore-watcher")
            try:
                thread.start()
            except RuntimeError:
                self._watches.discard(watch)
                raise
            self._thread = thread

    def remove(self, watch: Watch) -> None:
        """Report a watch no more. A report under way is not waited for."""
        with self._changed:
            self._watches.discard(watch)

    def stop(self, timeout: float) -> None:
        """Drop all watches and end the thread, within the timeout."""
        with self._changed:
            self._watches.clear()
        self.stop_if_idle(timeout)

    def stop_if_idle(self, timeout: float) -> None:
        """End the thread if it has no watch; wait for that within the timeout."""
        with self._changed:
            thread = self._thread
            if self._watches or thread is None:
                return
            self._stopping = True
            self._changed.notify()
        if thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while (due := self._wait_for_due()) is not None:
            for watch in due:
                self._report(watch)

    def _report(self, watch: Watch) -> None:
        delay = None
        try:
            delay = watch.report()
        except Exception as error:
            self._failures.add(watch.observer, error)
        now = time.monotonic()
        watch.due = now + (now - watch.started if delay is None else delay)

    def _wait_for_due(self) -> list[Watch] | None:
        """Wait until watches are due; return None after a while without any."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [watch for watch in self._watches if watch.due <= now]
                if due:
                    return sorted(due, key=lambda watch: watch.due)
                delay = min((w.due - now for w in self._watches), default=self._LINGER)
                expired = not self._stopping and not self._changed.wait(delay)
                if not self._watches and (expired or self._stopping):
                    self._thread = None
                    self._stopping = False
                    return None


# One a process: a thread for each store or barrier would cost more than it watches.
WATCHER: Final = Watcher(RECORDER.failures)
