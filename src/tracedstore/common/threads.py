"""Daemon threads whose start is bounded, and bounds in time for work that has none."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

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


# Threads that run bounded work, abandoned ones included.
_threads: set[DaemonThread] = set()
# Set when the process ends, which must not wait for a pause.
_ending = threading.Event()


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Run work in a thread and abandon it after a timeout.

    For Store calls that nothing else bounds: a TCPStore retries a connection to a
    server that is gone for as long as its own timeout, and waits without end for one
    that hangs.

    Raises:
        TimeoutError: The work took too long, and may still go on; or no thread can be
            started, and the work was not run.
        Exception: What the work raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    abandoned = False

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
            if abandoned:
                errors.clear()

    try:
        thread = start_bounded_thread(run)
    except RuntimeError as error:
        raise TimeoutError(f"not run: {error}") from error
    thread.join(seconds)
    if errors:
        # Not kept in the list: its traceback refers to that, and so to what the work
        # uses, a store mostly.
        raise errors.pop()
    if not results:
        # For the same reason: first the mark, so that one of the two threads does it.
        abandoned = True
        errors.clear()
        raise TimeoutError(f"not finished after {seconds:g} s")
    return results[0]


def countdown(seconds: float) -> Callable[[], float]:
    """Return a function that returns how many of these seconds are left, at least 0."""
    deadline = time.monotonic() + seconds
    return lambda: max(0.0, deadline - time.monotonic())


def track(thread: DaemonThread) -> None:
    """Join a thread at exit that uses a native store, and ends when it is asked to."""
    _threads.add(thread)


def forget(thread: DaemonThread) -> None:
    """Join a thread at exit no more, because it ends."""
    _threads.discard(thread)


def start_bounded_thread(work: Callable[[], None]) -> DaemonThread:
    """Start a thread for work that its caller waits for with a timeout.

    `join_bounded_threads` waits for it.

    Raises:
        RuntimeError: The limit of threads is reached, or the interpreter finalizes.
    """

    def run() -> None:
        try:
            work()
        finally:
            _threads.discard(thread)

    thread = DaemonThread(run, name="tracedstore-bounded")
    _threads.add(thread)
    try:
        thread.start()
    except RuntimeError:
        _threads.discard(thread)
        # It keeps its target, which refers to it, and to what the work uses.
        del thread
        raise
    return thread


def pause(seconds: float) -> bool:
    """Sleep in bounded work; return False, at once, if the process ends."""
    return not _ending.wait(seconds)


def end_pauses() -> None:
    """End all pauses, because the process ends."""
    _ending.set()


def end_bounded_threads() -> None:
    """Let bounded work end as soon as the Store call that it is in has returned."""
    for thread in list(_threads):
        if thread.ident is not None:
            # The documented way to raise an exception in a thread. These are ours.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )


def join_bounded_threads(timeout: float) -> bool:
    """Wait until no bounded work runs; return False after the timeout.

    At exit: a thread that returns from a native Store call while CPython before 3.14
    finalizes makes C++ abort.
    """
    deadline = time.monotonic() + timeout
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            _threads.discard(thread)
    return not _threads


def reset() -> None:
    """Forget the parent's threads, as a forked child must."""
    global _ending  # noqa: PLW0603 - another thread of the parent may hold its lock
    _ending = threading.Event()
    _threads.clear()
