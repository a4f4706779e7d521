"""Telemetry that fails is switched off, counted, and reported once."""

import logging

import pytest
from torch.distributed import HashStore

import tracedstore
from tracedstore.core.observer import Failures
from tracedstore.testing import OperationLog


class Raising:
    """An observer that fails."""

    name = "raising"

    def __init__(self) -> None:
        self.told = 0

    def observe(self, operation: tracedstore.Operation) -> None:
        """Fail."""
        self.told += 1
        raise ZeroDivisionError


class TestObservers:
    """Observers do not harm each other, nor the job."""

    def test_one_that_raises_is_told_nothing_more(self) -> None:
        """The others, before and after it, are told everything."""
        before, raising, after = OperationLog(), Raising(), OperationLog()
        tracedstore.configure(
            observers=[before, raising, after], slow_after=0, log_format="off"
        )
        store = tracedstore.wrap(HashStore())

        for _ in range(5):
            store.set("key", "value")

        assert (
            len(before.operations),
            raising.told,
            len(after.operations),
        ) == (5, 1, 5)

    def test_configure_gives_it_another_chance(self) -> None:
        """What is set up anew starts clean."""
        raising = Raising()
        for expected in (1, 2):
            tracedstore.configure(observers=[raising], slow_after=0, log_format="off")
            tracedstore.wrap(HashStore()).set("key", "value")

            assert raising.told == expected


class TestFailures:
    """Failures are counted, and the first of each part is reported."""

    def test_reported_once_and_counted_each_time(self) -> None:
        """A storm of failures is one report."""
        reports: list[str] = []
        failures = Failures()
        failures.report = lambda name, _error: reports.append(name)

        for _ in range(3):
            failures.add("spans", ValueError())
        failures.add("events", ValueError())

        assert reports == ["spans", "events"]
        assert failures.counts() == {"spans": 3, "events": 1}

    def test_last_resort(self, caplog: pytest.LogCaptureFixture) -> None:
        """Where reporting itself fails, the standard library's logging is left."""
        failures = Failures()

        def broken(_name: str, _error: BaseException) -> None:
            raise OSError("disk full")

        failures.report = broken
        with caplog.at_level(logging.ERROR, "tracedstore"):
            failures.add("spans", ValueError())

        assert "telemetry.disabled: spans raised OSError('disk full')" in caplog.text

    def test_even_logging_may_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then nobody is told, and still nothing is raised."""
        logger = logging.getLogger("tracedstore")

        class Broken(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError

        monkeypatch.setattr(logger, "handlers", [Broken()])
        failures = Failures()

        failures.add("spans", ValueError())

        assert failures.counts() == {"spans": 1}
