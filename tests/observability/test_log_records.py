"""Events as OpenTelemetry log records."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import (
    InMemoryLogRecordExporter,
    LogRecordExporter,
    LogRecordExportResult,
    SimpleLogRecordProcessor,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from tracedstore import names
from tracedstore.export.otel_export import RECORD_WRITER
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.testing import FlakyStore

ReadEvents = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def exported() -> InMemoryLogRecordExporter:
    """The exporter that receives the records of `loggers`."""
    return InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]


@pytest.fixture
def loggers(exported: InMemoryLogRecordExporter) -> Iterator[LoggerProvider]:
    """The application's LoggerProvider."""
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exported))
    yield provider
    provider.shutdown()


@pytest.fixture(autouse=True)
def clean_writer() -> Iterator[None]:
    """A writer without records and without a thread."""
    yield
    RECORD_WRITER.stop(20)
    RECORD_WRITER.reset()


def fail(store: FlakyStore, traced: tracedstore.TracedStore, times: int = 1) -> None:
    """Make calls that fail, which is an event."""
    store.fail("add", OSError("gone"), times)
    for _ in range(times):
        with pytest.raises(OSError, match="gone"):
            traced.add("counter/7", 1)


class TestRecord:
    """The record of one event."""

    def test_content(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        loggers: LoggerProvider,
        exported: InMemoryLogRecordExporter,
        events: ReadEvents,
    ) -> None:
        """It has name, severity, span, fields and line; repeats are limited."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, logger_provider=loggers
        )
        store = FlakyStore(HashStore())
        fail(store, tracedstore.wrap(store), times=3)
        assert RECORD_WRITER.flush(60)

        (event,) = events()
        (found,) = exported.get_finished_logs()
        record = found.log_record
        span = spans.get_finished_spans()[0].context
        assert record.event_name == event["event"] == "store.operation.failed"
        assert record.severity_number is SeverityNumber.WARN
        assert record.severity_text == "WARNING"
        assert span is not None
        assert (record.trace_id, record.span_id) == (span.trace_id, span.span_id)
        # Rendered twice, a moment apart.
        body = json.loads(str(record.body))
        assert body | {"timestamp": event["timestamp"]} == event
        shown = {"timestamp", "level", "event", "trace_id", "span_id"}
        assert record.attributes == {
            name: value for name, value in event.items() if name not in shown
        }
        assert found.instrumentation_scope is not None
        assert found.instrumentation_scope.name == "tracedstore"

    def test_lists(
        self,
        registry: CollectorRegistry,
        loggers: LoggerProvider,
        exported: InMemoryLogRecordExporter,
    ) -> None:
        """A list stays one, but for a list of mixed types; null is left out."""
        tracedstore.configure(registry=registry, logger_provider=loggers)
        fields: dict[str, Any] = {
            "joined": ["node1", "node2"],
            "joined_silent_seconds": [0.5, None],
            "round": None,
        }
        TELEMETRY.emit(names.RENDEZVOUS_WAITING, **fields)
        assert RECORD_WRITER.flush(60)

        (found,) = exported.get_finished_logs()
        attributes = dict(found.log_record.attributes or {})
        assert attributes["joined"] == ("node1", "node2")
        assert attributes["joined_silent_seconds"] == "[0.5, null]"
        assert "round" not in attributes
        assert not found.log_record.trace_id

    def test_off(
        self,
        registry: CollectorRegistry,
        loggers: LoggerProvider,
        exported: InMemoryLogRecordExporter,
        events: ReadEvents,
    ) -> None:
        """`events_exporter="log"` leaves the provider alone."""
        tracedstore.configure(
            registry=registry, logger_provider=loggers, events_exporter="log"
        )
        store = FlakyStore(HashStore())
        fail(store, tracedstore.wrap(store))

        assert len(events()) == 1
        assert not RECORD_WRITER.is_running
        assert not exported.get_finished_logs()


class TestBrokenProvider:
    """A LoggerProvider that fails does not affect the job and the log."""

    def test_raises(self, registry: CollectorRegistry, events: ReadEvents) -> None:
        """Each record is a counted failure; the first one is reported."""

        class Broken(LoggerProvider):
            def get_logger(self, *_args: Any, **_kwargs: Any) -> Any:
                raise OSError("collector gone")

        broken = Broken(shutdown_on_exit=False)
        tracedstore.configure(registry=registry, logger_provider=broken)
        store = FlakyStore(HashStore())
        fail(store, tracedstore.wrap(store))
        assert RECORD_WRITER.flush(60)

        found = [event["event"] for event in events()]
        assert found == ["store.operation.failed", "telemetry.disabled"]
        # The record of the event, and that of the report.
        assert RECORDER.failures.counts() == {"otel_logs": 2}

    def test_blocks(
        self,
        registry: CollectorRegistry,
        events: ReadEvents,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Events are in the log all the same; the failure is counted once."""
        blocked, released = threading.Event(), threading.Event()

        class Blocking(LogRecordExporter):
            def export(self, batch: Sequence[ReadableLogRecord]) -> Any:
                blocked.set()
                released.wait(60)
                return LogRecordExportResult.SUCCESS

            def shutdown(self) -> None:
                """Nothing to do."""

            def force_flush(self, timeout_millis: int = 0) -> bool:
                return True

        provider = LoggerProvider(shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(Blocking()))
        tracedstore.configure(registry=registry, logger_provider=provider)
        monkeypatch.setattr(RECORD_WRITER, "_stuck_after", 0.0)
        try:
            for url in ("first", "second", "third"):
                TELEMETRY.emit(names.TELEMETRY_SERVING, url=url)
                assert blocked.wait(60)

            found = events()
        finally:
            released.set()
        assert [event["url"] for event in found if "url" in event] == [
            "first",
            "second",
            "third",
        ]
        (report,) = [event for event in found if "observer" in event]
        assert (report["observer"], report["error_type"]) == ("otel_logs", "timeout")
        assert RECORDER.failures.counts() == {"otel_logs": 1}
