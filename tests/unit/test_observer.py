"""Observers that raise are removed; failures are counted and reported once."""

import logging

import pytest
from torch.distributed import HashStore

import tracedstore
from tracedstore.core.observer import Failures
from tracedstore.core.telemetry import NULL_TELEMETRY, NullTelemetry
from tracedstore.testing import OperationLog


class Raising:
    """An observer that fails."""

    name = "raising"

    def __init__(self) -> None:
        self.observed = 0

    def observe(self, operation: tracedstore.Operation) -> None:
        """Fail."""
        self.observed += 1
        raise ZeroDivisionError


class TestObservers:
    """Observers do not harm each other, nor the job."""

    def test_one_that_raises_is_removed(self) -> None:
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

    def test_configure_adds_it_again(self) -> None:
        """An observer that was removed observes again after `configure`."""
        raising = Raising()
        for expected in (1, 2):
            tracedstore.configure(observers=[raising], slow_after=0, log_format="off")
            tracedstore.wrap(HashStore()).set("key", "value")

            assert raising.observed == expected


class Reporting(NullTelemetry):
    """Keeps the failures that are reported."""

    def __init__(self) -> None:
        self.reports: list[str] = []

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Keep the name of the part."""
        self.reports.append(observer)


class Broken(NullTelemetry):
    """Cannot report."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Raise."""
        raise OSError("disk full")


class TestFailures:
    """Failures are counted, and the first of each part is reported."""

    def test_reported_once_and_counted_each_time(self) -> None:
        """A storm of failures is one report."""
        telemetry = Reporting()
        failures = Failures(telemetry)

        for _ in range(3):
            failures.add("spans", ValueError())
        failures.add("events", ValueError())

        assert telemetry.reports == ["spans", "events"]
        assert failures.counts() == {"spans": 3, "events": 1}

    def test_rearmed(self) -> None:
        """A part that is set up anew is reported again; its count stays."""
        telemetry = Reporting()
        failures = Failures(telemetry)
        failures.add("spans", ValueError())
        failures.add("events", ValueError())

        failures.rearm("spans")
        assert not failures.has("spans")
        assert failures.has("events")
        failures.add("spans", ValueError())

        assert telemetry.reports == ["spans", "events", "spans"]
        assert failures.counts() == {"spans": 2, "events": 1}

    def test_last_resort(self, caplog: pytest.LogCaptureFixture) -> None:
        """Where reporting itself fails, the standard library's logging is left."""
        failures = Failures(Broken())

        with caplog.at_level(logging.ERROR, "tracedstore"):
            failures.add("spans", ValueError())

        assert "telemetry.disabled: spans raised OSError('disk full')" in caplog.text

    def test_even_logging_may_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then nothing is reported, and nothing is raised."""
        logger = logging.getLogger("tracedstore")

        class BrokenHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError

        monkeypatch.setattr(logger, "handlers", [BrokenHandler()])
        failures = Failures(NULL_TELEMETRY)

        failures.add("spans", ValueError())

        assert failures.counts() == {"spans": 1}
