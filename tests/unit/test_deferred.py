"""Work that is done after the call which caused it, in a thread."""

import threading
from collections.abc import Iterator

import pytest

from tracedstore.common.threads import DaemonThread
from tracedstore.recording import deferred
from tracedstore.recording.deferred import DeferredWork
from tracedstore.recording.observer import Failures
from tracedstore.recording.telemetry import NullTelemetry


class SilentTelemetry(NullTelemetry):
    """Does not report failures."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Ignore the failure."""


@pytest.fixture
def failures() -> Failures:
    """Return the counts of what the work raises."""
    return Failures(SilentTelemetry())


@pytest.fixture
def work(failures: Failures) -> Iterator[DeferredWork]:
    """Return a queue for one test, and end its thread afterwards."""
    work = DeferredWork("barriers", failures)
    yield work
    work.stop(20)


def test_in_order_in_thread(work: DeferredWork, failures: Failures) -> None:
    """Work is done in order by one thread; what raises is counted and skipped."""
    done: list[tuple[int, str]] = []

    def do(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError
        done.append((number, threading.current_thread().name))

    for number in range(4):
        work.submit(lambda number=number: do(number))  # type: ignore[misc]

    assert work.flush(20)
    assert done == [(number, "tracedstore-deferred") for number in (0, 2, 3)]
    assert failures.counts() == {"barriers": 1}


def test_after_idle(work: DeferredWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that comes after a pause wakes the thread, without a flush."""
    monkeypatch.setattr(deferred, "_LINGER", 0.0)
    for _ in range(3):
        done = threading.Event()
        work.submit(done.set)
        assert done.wait(20)
        with work._changed:
            assert work._changed.wait_for(lambda: work._parked, 20)


def test_full(
    work: DeferredWork, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hangs in work keeps a bounded queue; the rest is a failure."""
    monkeypatch.setattr(deferred, "_MAX_QUEUED", 2)
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(20)

    work.submit(hang)
    assert begun.wait(20)
    work.submit(int)
    work.submit(int)
    assert failures.counts() == {}
    work.submit(int)
    assert failures.counts() == {"barriers": 1}
    assert not work.flush(0.01)
    release.set()
    assert work.flush(20)


def test_no_thread(
    work: DeferredWork, failures: Failures, monkeypatch: pytest.MonkeyPatch
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
    assert done.wait(20)


def test_stop_does_the_rest(work: DeferredWork) -> None:
    """Stopping does what is queued, and the next work starts the thread again."""
    for _ in range(2):
        done = threading.Event()
        work.submit(done.set)
        work.stop(20)
        assert done.is_set()
