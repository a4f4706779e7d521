"""The watcher reports long waits from one thread."""

import math
import threading
import time
from collections.abc import Iterator
from weakref import ref

import pytest

from tracedstore.recording.telemetry import Failures, Telemetry
from tracedstore.recording.watcher import Watch, Watcher

THREAD = "tracedstore-watcher"


class SilentTelemetry(Telemetry):
    """Does not report failures."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Ignore the failure."""


@pytest.fixture
def failures() -> Failures:
    """Return the counts of what watches raise."""
    return Failures(SilentTelemetry())


@pytest.fixture
def watcher(failures: Failures) -> Iterator[Watcher]:
    """Return a watcher for one test, and end its thread afterwards."""
    watcher = Watcher(failures)
    yield watcher
    for watch in list(watcher.watches):
        watcher.remove(watch)
    watcher.stop_if_idle(20)


class Reports:
    """Counts reports and waits for them."""

    def __init__(
        self, delay: float | None = 0.0, error: Exception | None = None
    ) -> None:
        self.count = 0
        self.threads: set[str] = set()
        self._delay = delay
        self._error = error
        self._changed = threading.Condition()

    def report(self) -> float | None:
        """Count the report, then raise or return as configured."""
        with self._changed:
            self.count += 1
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()
        if self._error is not None:
            raise self._error
        return self._delay

    def wait_for(self, count: int) -> bool:
        """Wait for this number of reports, at most 20 s."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, 20)


class TestReporting:
    """When a watch is reported."""

    def test_until_removed(self, watcher: Watcher) -> None:
        """A watch is reported repeatedly until it is removed."""
        reports, other = Reports(), Reports()
        watch = Watch("barriers", reports.report, after=0)
        watcher.add(watch)
        assert reports.wait_for(3)

        watcher.remove(watch)
        count = reports.count
        watcher.add(Watch("barriers", other.report, after=0))
        assert other.wait_for(3)

        # One report may have been running during remove().
        assert reports.count <= count + 1

    def test_doubling(self, watcher: Watcher) -> None:
        """A watch that returns no delay is due when its wait has doubled."""
        reports = Reports(delay=None)
        watch = Watch("barriers", reports.report, after=0.01)
        watcher.add(watch)
        assert reports.wait_for(2)
        watcher.remove(watch)
        watcher.stop_if_idle(20)

        waited = watch.due - watch.started
        assert waited >= 0.04

    def test_one_thread_for_all(self, watcher: Watcher) -> None:
        """All watches of a process share one thread."""
        all_reports = [Reports() for _ in range(5)]
        for reports in all_reports:
            watcher.add(Watch("barriers", reports.report, after=0))

        assert all(reports.wait_for(2) for reports in all_reports)
        assert set().union(*(reports.threads for reports in all_reports)) == {THREAD}
        alive = [t for t in threading.enumerate() if t is watcher._thread]
        assert len(alive) == 1

    def test_failing_watch(self, watcher: Watcher, failures: Failures) -> None:
        """The failure is counted, and the other watches are reported."""
        failing, other = Reports(error=ZeroDivisionError()), Reports()
        watcher.add(Watch("inflight", failing.report, after=0))
        assert failing.wait_for(1)
        watcher.add(Watch("barriers", other.report, after=0))

        assert other.wait_for(2)
        assert failures.counts()["inflight"] >= 1
        assert "barriers" not in failures.counts()


class TestLifetime:
    """A watch that is removed is freed, and the store that it refers to."""

    def test_removed_while_the_thread_waits(self, watcher: Watcher) -> None:
        """The thread has seen the watch, and waits for others."""
        reports = Reports()
        watcher.add(Watch("barriers", reports.report, after=3600))
        wait_until_it_waits(watcher)
        freed = ref(reports)

        watcher.watches.clear()
        del reports

        assert freed() is None

    def test_removed_after_a_report(self, watcher: Watcher) -> None:
        """The thread has reported the watch."""
        reports = Reports(delay=3600)
        watcher.add(Watch("barriers", reports.report, after=0))
        assert reports.wait_for(1)
        wait_until_it_waits(watcher)
        freed = ref(reports)

        watcher.watches.clear()
        del reports

        assert freed() is None


def wait_until_it_waits(watcher: Watcher) -> None:
    """Wait until the thread has looked at the watches, and waits for the next."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        # The thread has the lock unless it waits or reports.
        with watcher._changed:
            if math.isfinite(watcher.looks_at):
                return
    raise TimeoutError("the thread does not wait")


class TestThread:
    """When the thread runs."""

    def test_ends_when_idle(self, watcher: Watcher) -> None:
        """stop_if_idle() ends the thread without watches; the next one starts it."""
        for _ in range(2):
            reports = Reports()
            watch = Watch("barriers", reports.report, after=0)
            watcher.add(watch)
            assert reports.wait_for(1)
            watcher.stop_if_idle(20)
            assert watcher._thread is not None
            watcher.remove(watch)
            watcher.stop_if_idle(20)
            assert watcher._thread is None

    def test_ends_after_linger(
        self, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread ends after a time without watches."""
        monkeypatch.setattr(Watcher, "_LINGER", 0.01)
        reports = Reports()
        watch = Watch("barriers", reports.report, after=0)
        watcher.add(watch)
        assert reports.wait_for(1)
        thread = watcher._thread
        assert thread is not None
        watcher.remove(watch)

        thread.join(60)
        assert not thread.is_alive()

    def test_no_thread_can_be_started(
        self, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """add() raises the error, and the watch is not kept."""

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                watcher.add(Watch("barriers", Reports().report, after=0))

        assert not watcher.watches
        reports = Reports()
        watcher.add(Watch("barriers", reports.report, after=0))
        assert reports.wait_for(1)
