"""Telemetry runs where no signal handler can; what one raises is the job's."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from torch.distributed import HashStore

import tracedstore
from integration.harness import in_background, wait_until
from support.native import on_both_bases
from tracedstore.common import signal_safety
from tracedstore.common.signal_safety import (
    HELPERS,
    calling_thread,
    off_main_thread,
    raised_by_handler,
)
from tracedstore.export import setup
from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import NULL_TELEMETRY, Failures
from tracedstore.testing import OperationLog

_VARIABLE: ContextVar[str] = ContextVar("variable", default="")


class Stop(Exception):  # noqa: N818 - as a program names it
    """What a handler raises."""


def handler(_signum: int, _frame: object) -> None:
    """Raise."""
    raise Stop


class Callable_:  # noqa: N801 - a handler that is an object
    """A handler with a state."""

    def __call__(self, *_args: object) -> None:
        """Raise."""
        raise TimeoutError

    def method(self, _signum: int, _frame: object) -> None:
        """Raise, after the handler is removed, as handlers of SIGTERM often are."""
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        raise OSError


@contextmanager
def handling(function: Callable[..., Any]) -> Iterator[None]:
    """Handle SIGUSR1 by a function."""
    before = signal.signal(signal.SIGUSR1, function)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class TestOffMainThread:
    """What runs in a helper thread."""

    def test_thread(self) -> None:
        """The main thread hands over, and another one does not."""
        main = threading.get_ident()
        ran = off_main_thread(threading.get_ident)
        in_other: list[bool] = []
        other = threading.Thread(
            target=lambda: in_other.append(
                off_main_thread(threading.get_ident) == threading.get_ident()
            )
        )
        other.start()
        other.join()

        assert ran != main
        assert in_other == [True]
        assert off_main_thread(calling_thread) == main

    def test_context(self) -> None:
        """The work has the context variables of the caller."""
        _VARIABLE.set("of the caller")

        assert off_main_thread(_VARIABLE.get) == "of the caller"

    def test_error(self) -> None:
        """What the work raises reaches the caller."""
        with pytest.raises(ZeroDivisionError):
            off_main_thread(lambda: 1 // 0)

    def test_handler_during_the_wait(self) -> None:
        """Its exception reaches the caller, and the work goes on."""
        begun, go_on, done = (threading.Event() for _ in range(3))

        def work() -> None:
            begun.set()
            assert go_on.wait(60)
            done.set()

        def send() -> None:
            assert begun.wait(60)
            os.kill(os.getpid(), signal.SIGUSR1)

        sender = threading.Thread(target=send)
        with handling(handler):
            sender.start()
            with pytest.raises(Stop):
                off_main_thread(work)
        sender.join()
        go_on.set()
        assert done.wait(240)

    def test_handler_uses_it(self) -> None:
        """The helper of the interrupted work does not depend on the main thread."""
        begun, release = threading.Event(), threading.Event()
        lock = threading.Lock()

        def work() -> str:
            with lock:
                begun.set()
                assert release.wait(60)
            return "interrupted"

        def use(*_: object) -> None:
            release.set()
            assert off_main_thread(take) == "in the handler"

        def take() -> str:
            with lock:
                return "in the handler"

        def send() -> None:
            assert begun.wait(60)
            os.kill(os.getpid(), signal.SIGUSR1)

        sender = threading.Thread(target=send)
        with handling(use):
            sender.start()
            assert off_main_thread(work) == "interrupted"
        sender.join()

    def test_nothing_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A helper thread that waits for work refers to nothing of what it did."""
        monkeypatch.setattr(HELPERS, "idle", [])
        references = []
        for _ in range(2):  # in a new thread, and in one that waits
            given, made = Stop(), off_main_thread(Stop)
            off_main_thread(repr, given)
            references += [weakref.ref(given), weakref.ref(made)]
        del given, made

        assert [reference() for reference in references] == [None] * 4

    def test_no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a thread to be had, the main thread does the work."""

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(signal_safety, "start_new_thread", refuse)
        monkeypatch.setattr(HELPERS, "idle", [])

        assert off_main_thread(threading.get_ident) == threading.get_ident()

    def test_fork(self) -> None:
        """A forked child starts helper threads of its own."""
        off_main_thread(threading.get_ident)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = int(off_main_thread(os.getpid) != os.getpid())
            finally:
                os._exit(status)

        assert os.waitpid(pid, 0)[1] == 0

    def test_taken_and_given_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A helper thread whose work never came, because a handler raised, ends."""
        monkeypatch.setattr(signal_safety, "_WORK_TIMEOUT", 0.01)
        monkeypatch.setattr(HELPERS, "idle", [])
        taken = off_main_thread(threading.get_ident)
        wait_until(lambda: bool(HELPERS.idle))
        HELPERS.idle.pop()

        wait_until(lambda: taken not in HELPERS.thread_ids)


class TestRaisedByHandler:
    """Which exceptions are a handler's."""

    @pytest.mark.parametrize(
        "function",
        [
            handler,
            Callable_(),
            Callable_().method,
            functools.wraps(handler)(lambda *args: Callable_().method(*args)),
            functools.partial(lambda _extra, signum, frame: handler(signum, frame), 1),
        ],
    )
    def test_handler(self, function: Callable[..., Any]) -> None:
        """However the handler is written, and whatever it raises."""
        with handling(function), pytest.raises((Stop, OSError)) as raised:
            signal.raise_signal(signal.SIGUSR1)

        assert raised_by_handler(raised.value)

    def test_keeps_nothing(self) -> None:
        """Looking at an exception of this package makes no cycle of references."""
        kept = Stop()
        reference = weakref.ref(kept)

        def fail(_argument: object) -> None:
            try:
                [].pop()
            except IndexError as error:
                if raised_by_handler(error):
                    raise

        gc.disable()
        try:
            fail(kept)
            del kept
            assert reference() is None
        finally:
            gc.enable()

    def test_other(self) -> None:
        """An exception of any other code is not."""
        with pytest.raises(ZeroDivisionError) as raised:
            functools.partial(divmod, 1)(0)

        assert not raised_by_handler(raised.value)

    @pytest.mark.parametrize("error", [Stop, TimeoutError, RuntimeError])
    def test_guarded_step(self, error: type[Exception]) -> None:
        """An optional step does not take a handler's exception for its own."""
        failures = Failures(NULL_TELEMETRY)

        def raise_it(*_: object) -> None:
            raise error

        def step() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

        def call() -> None:
            signal.raise_signal(signal.SIGUSR1)

        def repeat() -> None:
            while True:  # until the handler has run in this thread
                failures.guarded("step", step)

        with handling(raise_it):
            with pytest.raises(error):
                repeat()
            with pytest.raises(error):
                failures.guarded_call("call", call)

        assert failures.counts() == {}


class TestGarbage:
    """A ``__del__`` that garbage collection runs inside telemetry uses a store."""

    def test_no_deadlock(self) -> None:
        """The telemetry of its call comes to locks that its thread holds already."""
        log = OperationLog()
        tracedstore.configure(observers=[log], slow_after=0, log_format="json")
        store = tracedstore.wrap(HashStore())
        telemetry = setup._process.telemetry
        assert telemetry is not None

        class Last:
            def __del__(self) -> None:
                store.set("key", "value")

        def collect() -> None:
            with (
                telemetry._events._lock,
                telemetry._stall_watch._lock,
                RECORDER.failures._lock,
            ):
                Last()

        in_background(collect).result(60)

        assert [each.method.name for each in log.operations] == ["set"]


class TestFork:
    """A fork of the main thread while a helper thread is at work."""

    @pytest.fixture(autouse=True)
    def own_helpers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No work of another test; a bound that only a hang reaches."""
        # Not `reset`, which would forget threads that go on.
        wait_until(lambda: not HELPERS.unfinished)
        monkeypatch.setattr(signal_safety, "_FORK_TIMEOUT", 3600.0)

    def test_handler(self) -> None:
        """A child inherits no lock of a store that a helper thread holds.

        The lock stands for the one that torch's C++ takes in a call of a TCPStore.
        """
        lock, forking = threading.Lock(), threading.Event()
        statuses: list[int] = []

        def fork_in_handler(_signum: int, _frame: object) -> None:
            forking.set()
            statuses.append(fork(lambda: lock.acquire(timeout=1)))

        off_main_thread_interrupted(fork_in_handler, lock, forking)

        assert statuses == [0]

    def test_after_a_handler_raised(self) -> None:
        """So it is when a handler has ended the wait for the helper thread."""
        lock, forking = threading.Lock(), threading.Event()
        with pytest.raises(Stop):
            off_main_thread_interrupted(handler, lock, forking)

        forking.set()
        assert fork(lambda: lock.acquire(timeout=1)) == 0

    def test_store_hangs(self) -> None:
        """A helper thread that hangs with a store delays no fork after the bound."""
        lock, forking = threading.Lock(), threading.Event()
        with pytest.raises(Stop):
            off_main_thread_interrupted(handler, lock, forking)

        for done in HELPERS.unfinished:
            HELPERS.unfinished[done] -= 3600.0  # when it began
        assert fork() == 0
        forking.set()

    @on_both_bases
    def test_work_of_a_base(self, core: str) -> None:
        """Whichever base hands over work, a fork knows of it until it is done."""
        counts: list[int] = []

        class Count(OperationLog):
            def observe(self, operation: Operation) -> None:
                super().observe(operation)
                counts.append(len(HELPERS.unfinished))

        tracedstore.configure(observers=[Count()], slow_after=0)
        tracedstore.wrap(HashStore()).set("key", "value")

        assert counts == [1], core
        assert not HELPERS.unfinished

    def test_busy_with_nothing(self) -> None:
        """A thread that was taken, but got no work, delays no fork."""
        off_main_thread(threading.get_ident)
        wait_until(lambda: bool(HELPERS.idle))
        HELPERS.idle.clear()

        assert fork() == 0

    def test_other_thread(self) -> None:
        """Without telemetry its fork would not wait for the main thread either."""
        HELPERS.unfinished["work"] = time.monotonic()

        assert in_background(fork).result(240) == 0
        HELPERS.unfinished.clear()


def fork(work: Callable[[], bool] = lambda: True) -> int:
    """Fork a child that does some work; return its exit status, 0 for a true result."""
    pid = os.fork()
    if pid == 0:
        os._exit(not work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def off_main_thread_interrupted(
    handle: Callable[..., None], lock: threading.Lock, forking: threading.Event
) -> None:
    """Hold a lock in a helper thread until a fork, and interrupt the wait for it."""
    main = threading.main_thread().ident or 0

    def work() -> None:
        with lock:
            signal.pthread_kill(main, signal.SIGUSR1)
            forking.wait(240)
            time.sleep(0.3)  # a fork that does not wait is made now

    with handling(handle):
        off_main_thread(work)
