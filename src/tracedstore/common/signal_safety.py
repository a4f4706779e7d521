"""Keeps signal handlers of the job out of telemetry, and telemetry out of them.

CPython runs the Python code of a signal handler in the main thread, between any two
bytecodes of whatever runs there. Two things follow for telemetry that runs in the main
thread:

- What the handler raises (torchrun's ``SignalException``, a ``TimeoutError`` of an
  alarm) looks like a failure of the telemetry, which is caught and counted. The program
  never gets it, and a job that should end does not. No list of exception types tells
  the two apart, and the SDKs that telemetry calls catch exceptions, too.
- If the handler uses a traced store, the telemetry of that call waits for locks that
  the interrupted telemetry holds, for ever.

So the main thread runs no telemetry that catches exceptions or takes locks. A helper
thread does, where no handler can run, and the main thread waits for it. A handler that
runs during this wait may raise: that ends the wait and reaches the program, and the
helper thread goes on. It may use a traced store: the helper thread does not depend on
the main thread, so its locks are released.

Other threads run no handlers, and run their telemetry themselves.
"""

import os
import threading
import time
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from contextvars import Context, copy_context
from inspect import CO_VARARGS
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

# Seconds between two checks whether this process is a forked child, which has no
# helper threads. A handler may fork while the main thread waits for one.
_CHECK_INTERVAL = 1.0
# Seconds after which a helper thread that was taken, but got no work, ends: a handler
# has raised between the two.
_WORK_TIMEOUT = 60.0
_PACKAGE: Final = str(Path(__file__).parents[1])
# Seconds after which a fork of the main thread waits for work no more. Reading who is
# missing is over after four; what takes longer hangs with its store.
_FORK_TIMEOUT = 5.0
# Helper threads that wait for work at a time. One is enough, unless handlers use stores
# or threads of ranks fail together.
_MAX_IDLE = 4


class _Work(NamedTuple):
    """Work for a helper thread, as the native base makes it, too.

    Attributes:
        context: The context variables of the caller, to run it in.
        function: The work.
        args: Its arguments.
        results: Gets the result; stays empty if the work raises.
        errors: Gets what the work raises.
        done: A locked lock, which is released when it is done.
    """

    context: Context
    function: Callable[..., Any]
    args: tuple[Any, ...]
    results: list[Any]
    errors: list[BaseException]
    done: Any


class _NoHelperThread(Exception):  # noqa: N818 - a state, which may pass
    """The limit of threads is reached, the interpreter finalizes, or this is a fork."""


class HelperThreads:
    """Threads that run the telemetry of the main thread.

    Handing work over takes no lock and starts a thread by one call of C, so a handler
    that interrupts it leaves nothing locked.

    Attributes:
        idle: The queues of the threads that wait for work. The native base takes from
            it, too.
        thread_ids: The ids of these threads.
        unfinished: When work was handed over that is not done yet, by its lock. The
            native base adds to it, too.
    """

    def __init__(self) -> None:
        self.idle: list[SimpleQueue[_Work]] = []
        self.thread_ids: set[int] = set()
        self.unfinished: dict[Any, float] = {}

    def reset(self) -> None:
        """Forget the parent's threads, as a forked child must."""
        self.idle.clear()
        self.thread_ids.clear()
        self.unfinished.clear()

    def wait_before_fork(self) -> None:
        """Let no helper thread be in a Store call when the main thread forks.

        Without telemetry the main thread makes the calls of a barrier that fails, and
        runs no handler in them. A child that is forked meanwhile inherits the store
        with its lock held by a thread that the child has not, and both processes use
        the connection at once.

        Work is unfinished here in two cases only: a handler that interrupted the wait
        for it forks, or a handler has raised out of that wait.
        """
        if get_ident() != threading.main_thread().ident:
            return
        for done, began in self.unfinished.copy().items():
            deadline = began + _FORK_TIMEOUT
            # Not by taking the lock: a handler that raises would leave it taken.
            while done in self.unfinished and time.monotonic() < deadline:
                time.sleep(0.001)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run work in a helper thread, and wait for its result.

        Raises:
            _NoHelperThread: There is none. The work was not run.
            BaseException: What the work raised, or a signal handler during the wait.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        done = allocate_lock()
        done.acquire()
        self._submit(_Work(copy_context(), function, args, results, errors, done))
        pid = os.getpid()
        while not done.acquire(timeout=_CHECK_INTERVAL):
            if os.getpid() != pid:
                raise _NoHelperThread
        if errors:
            # Not kept in the list: its traceback refers to that, and so to what the
            # work uses, a store mostly.
            raise errors.pop()
        return results.pop()

    def _submit(self, work: _Work) -> None:
        self.unfinished[work.done] = time.monotonic()
        queue = self._take() if self.idle else None
        if queue is None:
            self._start(work)
        else:
            queue.put(work)

    def _take(self) -> "SimpleQueue[_Work] | None":
        try:
            return self.idle.pop()
        except IndexError as error:  # a handler has taken it
            if raised_by_handler(error):
                raise
            return None

    def _start(self, work: _Work) -> None:
        try:
            start_new_thread(self.serve, ([work],))
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            self.unfinished.pop(work.done, None)
            raise _NoHelperThread from error

    def serve(self, first: list[_Work]) -> None:
        """Do work until enough other threads wait for it; the target of a thread.

        Args:
            first: The first work. It is taken out: arguments live as long as a thread,
                and what they refer to must not.
        """
        # For stacks: the thread is not started as a threading.Thread, whose start takes
        # locks.
        threading.current_thread().name = "tracedstore-helper"
        self.thread_ids.add(get_ident())
        try:
            self._serve(first)
        finally:
            self.thread_ids.discard(get_ident())

    def _serve(self, first: list[_Work]) -> None:
        queue: SimpleQueue[_Work] = SimpleQueue()
        work = first.pop()
        while True:
            context, function, args, results, errors, done = work
            try:
                results.append(context.run(function, *args))
            except BaseException as error:
                errors.append(error)
            # Before the main thread goes on: a store that is kept keeps its port.
            del work, context, function, args, results, errors
            self.unfinished.pop(done, None)
            done.release()
            if len(self.idle) >= _MAX_IDLE:
                return
            self.idle.append(queue)
            try:
                work = self._wait(queue)
            except Empty:
                return

    def _wait(self, queue: "SimpleQueue[_Work]") -> _Work:
        """Wait for work.

        Raises:
            Empty: The thread was taken, but got none.
        """
        while True:
            taken = queue not in self.idle
            try:
                return queue.get(timeout=_WORK_TIMEOUT)
            except Empty:
                if taken:
                    raise


HELPERS: Final = HelperThreads()
os.register_at_fork(before=HELPERS.wait_before_fork, after_in_child=HELPERS.reset)


def off_main_thread(function: Callable[..., T], *args: Any) -> T:
    """Run telemetry where no signal handler can run, and return its result.

    In the main thread that is a helper thread, with the context variables of the
    caller. Any other thread runs it itself. So does the main thread if no thread can be
    started: a process at its limit of threads gets its verdicts all the same.

    Raises:
        BaseException: What the work raised, or a signal handler during the wait.
    """
    if get_ident() == threading.main_thread().ident:
        try:
            return HELPERS.run(function, *args)
        except _NoHelperThread:
            pass  # below, so that what it raises has no context
    return function(*args)


def calling_thread() -> int:
    """Return the id of the thread on whose behalf this one runs, mostly its own."""
    own = get_ident()
    main = threading.main_thread().ident
    return main if main is not None and own in HELPERS.thread_ids else own


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception, as its traceback tells.

    For the few places where the main thread itself catches exceptions: in code of this
    package that calls nothing else but the store. A handler is called with the frame
    that it interrupted, which is also the frame below its own. No other function of
    that code gets the frame of its caller.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if _is_handler(traceback.tb_frame):
            return True
        traceback = traceback.tb_next
    return False


def _is_handler(frame: FrameType) -> bool:
    interrupted, code = frame.f_back, frame.f_code
    takes_two = code.co_argcount > 1 or code.co_flags & CO_VARARGS
    # Reading the variables of a frame makes it keep them, the exception and so itself
    # included: not of frames that cannot be a handler's.
    if interrupted is None or not takes_two or code.co_filename.startswith(_PACKAGE):
        return False
    for value in frame.f_locals.values():
        # ``def handler(signum, frame)``, or ``def handler(*args)``.
        if value is interrupted or (
            type(value) is tuple and any(one is interrupted for one in value)
        ):
            return True
    return False
