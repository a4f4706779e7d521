"""Daemon threads whose start is bounded in time."""

import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds for a new thread to begin. A caller of a Store waits for that.
_START_TIMEOUT = 1.0
# Seconds without another attempt, so that not every call waits.
_PAUSE = 10.0


class DaemonThread(threading.Thread):
    """A daemon thread that begins within a second, or never.

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
        self._begun = threading.Event()
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

        `threading.Thread.join` raises RuntimeError then.
        """
        began = time.monotonic()
        wait = _START_TIMEOUT if timeout is None else min(timeout, _START_TIMEOUT)
        if not self._begun.wait(wait):
            return
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - began))
        super().join(timeout)


class _BoundedEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_START_TIMEOUT if timeout is None else timeout)
