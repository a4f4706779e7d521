"""A thread with a queue: order, bounds, and what work that blocks costs the caller."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tracedstore.common.threads import DaemonThread
from tracedstore.recording import queue_worker
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.telemetry import Failures, Telemetry
from tracedstore.signals.events import _write_line


class Quiet(Telemetry):
    """Reports no failures."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Drop it."""


class Log:
    """A log that can be blocked."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def write(self, line: int) -> None:
        """Write a line, once the log is open."""
        self.entered.set()
        assert self.open.wait(240)
        self.lines.append(line)


@pytest.fixture
def failures() -> Failures:
    """Counts what a write raises."""
    return Failures(Quiet())


@pytest.fixture
def log() -> Iterator[Log]:
    """A log, open at the end."""
    log = Log()
    yield log
    log.open.set()


@pytest.fixture
def writer(failures: Failures, log: Log) -> Iterator[QueueWorker]:
    """A writer whose thread has ended afterwards."""
    writer = QueueWorker("tracedstore-events-writer", "events", failures)
    yield writer
    log.open.set()
    writer.stop(20)


@pytest.fixture
def work(failures: Failures) -> Iterator[QueueWorker]:
    """A worker as for completed barriers, and end its thread afterwards."""
    work = QueueWorker(
        "tracedstore-deferred", "barriers", failures, delay=0.1, counts_drops=True
    )
    yield work
    work.stop(20)


class TestOrder:
    """Events are written in the order of their submission."""

    def test_one_thread(self, writer: QueueWorker, log: Log) -> None:
        """Whether the caller waits or not."""
        for number in range(200):
            writer.submit(lambda n=number: log.write(n), wait=0.2 * (number % 3 == 0))  # type: ignore[misc]

        assert writer.flush(240)
        assert log.lines == list(range(200))

    def test_written_when_submit_returns(self, writer: QueueWorker, log: Log) -> None:
        """A caller that waits finds its event written."""
        for number in range(50):
            writer.submit(lambda n=number: log.write(n), wait=0.2)  # type: ignore[misc]
            assert log.lines[-1] == number


class TestBlockedLog:
    """A log that blocks costs a bounded time, once."""

    def test_wait_is_bounded(self, writer: QueueWorker, log: Log) -> None:
        """The first caller waits 0.2 s; later ones do not wait for a stuck writer."""
        log.open.clear()
        began = time.monotonic()
        writer.submit(lambda: log.write(0), wait=0.2)
        first = time.monotonic() - began
        began = time.monotonic()
        for number in range(1, 100):
            writer.submit(lambda n=number: log.write(n), wait=0.2)  # type: ignore[misc]
        rest = time.monotonic() - began

        assert 0.15 < first < 10
        # Each of them alone would wait 0.2 s, 20 s in all.
        assert rest < 10
        log.open.set()
        assert writer.flush(240)
        assert log.lines == list(range(100))

    def test_drops_are_counted(
        self, writer: QueueWorker, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What does not fit is dropped; what fits is written when the log opens."""
        monkeypatch.setattr(queue_worker, "_MAX_QUEUED", 8)
        log.open.clear()
        writer.submit(lambda: log.write(0))
        assert log.entered.wait(240)
        for number in range(1, 21):
            writer.submit(lambda n=number: log.write(n))  # type: ignore[misc]

        assert writer.dropped == 12
        assert not writer.flush(0.01)
        log.open.set()
        assert writer.flush(240)
        assert log.lines == list(range(9))

    def test_stop_is_bounded(self, writer: QueueWorker, log: Log) -> None:
        """A blocked log does not hold up the end of the process."""
        log.open.clear()
        writer.submit(lambda: log.write(0))
        assert log.entered.wait(240)
        began = time.monotonic()

        writer.stop(0.1)

        assert time.monotonic() - began < 10


class TestFailures:
    """A write that raises is counted, and the next one is tried."""

    def test_counted(self, writer: QueueWorker, log: Log, failures: Failures) -> None:
        """The writer lives on."""
        writer.submit(lambda: 1 // 0, wait=0.2)
        writer.submit(lambda: log.write(1), wait=0.2)

        assert log.lines == [1]
        assert failures.counts() == {"events": 1}

    def test_no_thread_can_be_started(
        self, writer: QueueWorker, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Events are dropped and counted, until a thread can be started."""

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            writer.submit(lambda: log.write(0), wait=0.2)
        writer.submit(lambda: log.write(1), wait=0.2)

        assert (log.lines, writer.dropped) == ([1], 1)

    def test_a_write_may_emit(self, writer: QueueWorker, log: Log) -> None:
        """A handler that causes another event does not deadlock."""
        writer.submit(lambda: writer.submit(lambda: log.write(1), wait=0.2), wait=0.2)

        assert writer.flush(240)
        assert log.lines == [1]


class TestThread:
    """When the thread runs."""

    def test_restarts(self, writer: QueueWorker, log: Log) -> None:
        """A writer that was stopped starts again with the next event."""
        for number in range(2):
            writer.submit(lambda n=number: log.write(n), wait=0.2)  # type: ignore[misc]
            writer.stop(20)
            assert writer._thread is None

        assert log.lines == [0, 1]

    def test_forked(self, writer: QueueWorker, log: Log) -> None:
        """A forked child has neither the parent's queue nor its thread."""
        log.open.clear()
        writer.submit(lambda: log.write(0))
        assert log.entered.wait(240)
        writer.submit(lambda: log.write(1))
        child = os.fork()
        if child == 0:
            written: list[int] = []
            writer.reset()
            writer.submit(lambda: written.append(2))
            os._exit(0 if writer.flush(240) and written == [2] else 1)

        _, status = os.waitpid(child, 0)
        log.open.set()

        assert os.waitstatus_to_exitcode(status) == 0
        assert writer.flush(240)
        assert log.lines == [0, 1]


class TestDelayed:
    """Work that is done a moment after the call which caused it."""

    def test_in_order_in_thread(self, work: QueueWorker, failures: Failures) -> None:
        """Work is done in order by one thread; what raises is counted and skipped."""
        done: list[tuple[int, str]] = []

        def do(number: int) -> None:
            if number == 1:
                raise ZeroDivisionError
            done.append((number, threading.current_thread().name))

        for number in range(4):
            work.submit(lambda number=number: do(number))  # type: ignore[misc]

        assert work.flush(240)
        assert done == [(number, "tracedstore-deferred") for number in (0, 2, 3)]
        assert failures.counts() == {"barriers": 1}

    def test_after_idle(
        self, work: QueueWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Work that comes after a pause wakes the thread, without a flush."""
        monkeypatch.setattr(queue_worker, "_LINGER", 0.0)
        for _ in range(3):
            done = threading.Event()
            work.submit(done.set)
            assert done.wait(240)
            with work._changed:
                assert work._changed.wait_for(lambda: work._parked, 20)

    def test_full(
        self, work: QueueWorker, failures: Failures, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread that hangs in work keeps a bounded queue; the rest is a failure."""
        monkeypatch.setattr(queue_worker, "_MAX_QUEUED", 2)
        begun, release = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            release.wait(240)

        work.submit(hang)
        assert begun.wait(240)
        work.submit(int)
        work.submit(int)
        assert failures.counts() == {}
        work.submit(int)
        assert failures.counts() == {"barriers": 1}
        assert not work.flush(0.01)
        release.set()
        assert work.flush(240)

    def test_no_thread(
        self, work: QueueWorker, failures: Failures, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that can start no thread counts a failure, and queues nothing."""

        def refuse(*_args: object, **_options: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(DaemonThread, "start", refuse)
            work.submit(int)
        assert failures.counts() == {"barriers": 1}

        done = threading.Event()
        work.submit(done.set)
        assert done.wait(240)

    def test_stop_does_the_rest(self, work: QueueWorker) -> None:
        """Stopping does what is queued, and the next work starts the thread again."""
        for _ in range(2):
            done = threading.Event()
            work.submit(done.set)
            work.stop(20)
            assert done.is_set()


def test_standard_error_that_would_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-blocking standard error that is full delays a line, and loses nothing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    with os.fdopen(writing, "w") as full, os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "__stderr__", full)
        monkeypatch.setattr(sys, "stderr", full)
        writer = threading.Thread(target=_write_line, args=("the line\n",))
        writer.start()
        received = b""
        while not received.endswith(b"the line\n"):
            received += pipe.read1()
        writer.join(240)
        assert not writer.is_alive()
        monkeypatch.undo()
