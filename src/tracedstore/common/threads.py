"""Daemon threads whose start is bounded in time."""

import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds for a new thread to begin. A caller of a Store waits for that. On two cores
# with a load of 30, threads have taken more than one.
_START_TIMEOUT = 3.0
# Seconds without another attempt, so that not every call waits.
_PAUSE = 10.0
_SLICES = 10


class DaemonThread(threading.Thread):
    """A daemon thread that begins within three seconds, or never.

    `threading.Thread.start` waits until the new thread reports that it has begun. In a
    process without memory the thread may end before that, and `start` would never
    return.
    """

    # Until when no thread is started, by ``time.monotonic``.
    _paused_until = 0.0

    def __init__(
        self, target: Callable[..., object], *args: Any, name: str | None = None
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        # Taken once: by the thread when it begins, or by `start` when it gives up.
        self._turn = threading.Lock()
        self._begun = _BoundedEvent()
        # A private name of CPython 3.11 to 3.14. Without it the start has no bound.
        if isinstance(getattr(self, "_started", None), threading.Event):
            self._started = _BoundedEvent()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The limit of threads is reached, the interpreter finalizes, or
                the thread does not begin.
        """
        if time.monotonic() < DaemonThread._paused_until:
            raise RuntimeError("a thread has not begun a moment ago")
        super().start()
        if self.ident is None and self._turn.acquire(blocking=False):
            DaemonThread._paused_until = time.monotonic() + _PAUSE
            raise RuntimeError(f"a thread has not begun after {_START_TIMEOUT:g} s")

    def run(self) -> None:
        """Call the target, unless `start` has given up."""
        self._begun.set()
        if self._turn.acquire(blocking=False):
            super().run()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, also if another thread is just starting it.

        `threading.Thread.join` raises RuntimeError then. The timeout includes the time
        that the thread takes to begin.
        """
        if timeout is None:
            if self._begun.wait():
                super().join()
            return
        waiting_since = time.monotonic()
        if self._begun.wait(min(timeout, _START_TIMEOUT)):
            left = timeout - (time.monotonic() - waiting_since)
            _wait_in_slices(self._ends_within, max(0.0, left))

    def _ends_within(self, seconds: float) -> bool:
        super().join(seconds)
        return not self.is_alive()


class _BoundedEvent(threading.Event):
    """An event that is not waited for longer than `_START_TIMEOUT`."""

    def wait(self, timeout: float | None = None) -> bool:
        seconds = _START_TIMEOUT if timeout is None else timeout
        return _wait_in_slices(super().wait, seconds)


def _wait_in_slices(wait: Callable[[float], bool], timeout: float) -> bool:
    """Wait, so that a process which is stopped meanwhile loses a tenth of the time."""
    return any(wait(timeout / _SLICES) for _ in range(_SLICES))
