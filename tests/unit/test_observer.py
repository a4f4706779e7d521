"""Observers that raise rest; failures are counted and reported once."""

import logging

import pytest
from torch.distributed import HashStore

import tracedstore
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import NULL_TELEMETRY, Failures, Telemetry
from tracedstore.testing import OperationLog


class Raising:
    """An observer that raises."""

    name = "raising"

    def __init__(self) -> None:
        self.observed = 0

    def observe(self, operation: tracedstore.Operation) -> None:
        """Count the call and raise."""
        self.observed += 1
        raise ZeroDivisionError


class TestObservers:
    """An observer that raises does not affect other observers or the job."""

    def test_raising_observer_is_removed(self) -> None:
        """The observers before and after it get every operation."""
        before, raising, after = OperationLog(), Raising(), OperationLog()
        tracedstore.configure(
            observers=[before, raising, after], slow_after=0, log_format="off"
        )
        store = tracedstore.wrap(HashStore())

        for _ in range(5):
            store.set("key", "value")

        assert (
            len(before.operations),
            raising.observed,
            len(after.operations),
        ) == (5, 1, 5)

    def test_name_of_one_of_ours(self) -> None:
        """An application's observer that raises does not make ours rest."""
        raising = Raising()
        raising.name = "metrics"
        tracedstore.configure(observers=[raising], slow_after=0, log_format="off")

        tracedstore.wrap(HashStore()).set("key", "value")

        assert RECORDER.failures.counts()["application_metrics"] == 1
        assert not RECORDER.failures.rests("metrics")

    def test_configure_adds_it_again(self) -> None:
        """A removed observer is called again after configure()."""
        raising = Raising()
        for expected in (1, 2):
            tracedstore.configure(observers=[raising], slow_after=0, log_format="off")
            tracedstore.wrap(HashStore()).set("key", "value")

            assert raising.observed == expected


class Reporting(Telemetry):
    """Keeps the failures that are reported."""

    def __init__(self) -> None:
        self.reports: list[str] = []

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Keep the name of the part."""
        self.reports.append(observer)


class Broken(Telemetry):
    """Cannot report."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Raise."""
        raise OSError("disk full")


class TestFailures:
    """Failures are counted, and the first of each part is reported."""

    def test_reported_once_and_counted_each_time(self) -> None:
        """Repeated failures of one part are reported once and all counted."""
        telemetry = Reporting()
        failures = Failures(telemetry)

        for _ in range(3):
            failures.add("spans", ValueError())
        failures.add("events", ValueError())

        assert telemetry.reports == ["spans", "events"]
        assert failures.counts() == {"spans": 3, "events": 1}

    def test_rearmed(self) -> None:
        """rearm() makes the next failure of each part reported again; counts stay."""
        telemetry = Reporting()
        failures = Failures(telemetry)
        failures.add("spans", ValueError())
        failures.add("events", ValueError())

        failures.rearm()
        assert not failures.rests("spans")
        assert not failures.rests("events")
        failures.add("spans", ValueError())

        assert telemetry.reports == ["spans", "events", "spans"]
        assert failures.counts() == {"spans": 2, "events": 1}

    def test_last_resort(self, caplog: pytest.LogCaptureFixture) -> None:
        """If reporting fails, the failure is logged with the standard library."""
        failures = Failures(Broken())

        with caplog.at_level(logging.ERROR, "tracedstore"):
            failures.add("spans", ValueError())

        assert "telemetry.disabled: spans raised OSError('disk full')" in caplog.text

    def test_logging_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If logging fails too, nothing is reported and nothing is raised."""
        logger = logging.getLogger("tracedstore")

        class BrokenHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError

        monkeypatch.setattr(logger, "handlers", [BrokenHandler()])
        failures = Failures(NULL_TELEMETRY)

        failures.add("spans", ValueError())

        assert failures.counts() == {"spans": 1}
