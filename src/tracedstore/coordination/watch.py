"""Call back the barriers that wait too long: after a while, then at doubling times."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tracedstore import names
from tracedstore.core.recorder import Recorder


@dataclass(slots=True, eq=False)
class Waiting:
    """A barrier that somebody waits at.

    Attributes:
        tell: Called, in the watch's thread, each time it is due.
        after: Seconds from its start to the first time.
        started: When it began, by `time.monotonic`.
        due: When to tell next.
    """

    tell: Callable[[], None]
    after: float
    started: float = field(default_factory=time.monotonic)
    due: float = 0.0

    def __post_init__(self) -> None:
        self.due = self.started + self.after


class BarrierWatch:
    """One thread for all the barriers of a process, and none while nobody waits."""

    # How long the thread stays with nothing to do, for the next barrier to find.
    _LINGER = 10.0

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Start anew, as a forked child does, which has not the parent's thread."""
        self._changed = threading.Condition()
        self._waiting: set[Waiting] = set()
        self._thread: threading.Thread | None = None

    def add(self, waiting: Waiting) -> None:
        """Watch a barrier until it is removed."""
        with self._changed:
            self._waiting.add(waiting)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tracedstore-barrier-watch", daemon=True
                )
                self._thread.start()
            else:
                self._changed.notify()

    def remove(self, waiting: Waiting) -> None:
        """Watch it no longer; one that is being told of is told to the end."""
        with self._changed:
            self._waiting.discard(waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._next_due()
                if due is None:
                    return
            for waiting in due:
                try:
                    waiting.tell()
                except Exception as error:
                    self._recorder.failures.add(names.BARRIERS, error)
                now = time.monotonic()
                waiting.due = max(now, waiting.started + 2 * (now - waiting.started))

    def _next_due(self) -> list[Waiting] | None:
        """Wait until something is due; None when there was nothing for long."""
        while True:
            now = time.monotonic()
            due = [waiting for waiting in self._waiting if waiting.due <= now]
            if due:
                return due
            soonest = min((w.due - now for w in self._waiting), default=self._LINGER)
            if not self._changed.wait(soonest) and not self._waiting:
                self._thread = None
                return None
