"""run_with_timeout() bounds the time of a function."""

import gc
import threading
from contextlib import suppress
from functools import partial
from weakref import ref

import pytest

from tracedstore.common import threads
from tracedstore.common.threads import (
    end_pauses,
    join_bounded_threads,
    pause,
    run_with_timeout,
    start_bounded_thread,
)


def _divide(_used: object) -> None:
    _ = 1 // 0


class TestRunWithTimeout:
    """The caller gets the result, the exception or a TimeoutError."""

    def test_result(self) -> None:
        """The caller gets the function's result."""
        assert run_with_timeout(20, lambda: 7) == 7

    def test_exception(self) -> None:
        """The caller gets the function's exception."""
        with pytest.raises(ZeroDivisionError):
            run_with_timeout(20, lambda: 1 // 0)

    def test_exception_keeps_nothing(self) -> None:
        """What the function used is freed with its exception, without the collector."""

        class Used:
            """Something that the function uses."""

        used = Used()
        freed = ref(used)
        gc.disable()
        try:
            with suppress(ZeroDivisionError):
                run_with_timeout(20, partial(_divide, used))
            del used
            assert freed() is None
        finally:
            gc.enable()

    def test_late_exception_keeps_nothing(self) -> None:
        """The same for a function that raises after its timeout."""

        class Used:
            """Something that the function uses."""

        used = Used()
        freed = ref(used)
        release, begun = threading.Event(), threading.Event()
        threads: list[threading.Thread] = []

        def fail(_used: Used) -> None:
            threads.append(threading.current_thread())
            begun.set()
            release.wait(60)
            raise ZeroDivisionError

        gc.disable()
        try:
            with suppress(TimeoutError):
                run_with_timeout(0.01, partial(fail, used))
            del used
            assert begun.wait(60)
            release.set()
            threads.pop().join(60)
            assert freed() is None
        finally:
            gc.enable()

    def test_thread_that_does_not_begin_keeps_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same where no thread can be started."""

        class Used:
            """Something that the function uses."""

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        used = Used()
        freed = ref(used)
        gc.disable()
        try:
            with suppress(TimeoutError):
                run_with_timeout(20, partial(_divide, used))
            del used
            assert freed() is None
        finally:
            gc.enable()

    def test_timeout(self) -> None:
        """A function that does not return in time is abandoned."""
        release = threading.Event()
        try:
            with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
                run_with_timeout(0.01, lambda: release.wait(60))
        finally:
            release.set()

    def test_no_thread_can_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The function is not called: without a thread its time is not bounded."""

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        calls: list[bool] = []

        with pytest.raises(TimeoutError, match="not run: can't start new thread"):
            run_with_timeout(20, lambda: calls.append(True))

        assert not calls


def test_bounded_thread_is_joined() -> None:
    """join_bounded_threads waits for a thread until it has ended."""
    release = threading.Event()

    def wait() -> None:
        release.wait(60)

    start_bounded_thread(wait)
    try:
        assert not join_bounded_threads(0.01)
    finally:
        release.set()
    assert join_bounded_threads(20)


def test_pause_ends_with_the_process() -> None:
    """Bounded work that pauses does not delay the end of the process."""
    ended: list[bool] = []
    thread = start_bounded_thread(lambda: ended.append(pause(3600)))
    try:
        end_pauses()
        thread.join(60)
        assert ended == [False]
    finally:
        threads.reset()
    assert pause(0.001)
