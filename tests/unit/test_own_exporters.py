"""The exporters that this package sets up."""

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tracedstore import names
from tracedstore.export.own_exporters import own_resource
from tracedstore.export.tracer_provider import OwnSpanProcessor
from tracedstore.recording.recorder import RECORDER


class SlowExporter(SpanExporter):
    """Exports when it is allowed to."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Wait, and count the spans."""
        self.began.set()
        assert self.may_end.wait(60)
        self.exported += len(spans)
        return SpanExportResult.SUCCESS


def counts(metric: names.Metric) -> dict[tuple[str, ...], float]:
    """Return the values of a metric of this process."""
    (found,) = [one for one in RECORDER.cold.read() if one.cold.metric is metric]
    return dict(found.numbers)


def test_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans for which there is no room are counted, and no others."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    RECORDER.cold.reset()
    exporter = SlowExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(OwnSpanProcessor(exporter))
    # Zero is not the same as no exporter.
    assert counts(names.EXPORTS) == {("spans", "ok"): 0, ("spans", "failed"): 0}
    assert counts(names.EXPORT_DROPPED) == {("spans",): 0}

    tracer = provider.get_tracer("test")
    for _ in range(10):
        tracer.start_span("a").end()
    assert exporter.began.wait(60)
    # The exporter has ten, and there is room for ten more.
    for _ in range(25):
        tracer.start_span("b").end()
    exporter.may_end.set()
    provider.shutdown()

    assert exporter.exported == 20
    assert counts(names.EXPORT_DROPPED) == {("spans",): 15}
    assert counts(names.EXPORTS) == {("spans", "ok"): 2, ("spans", "failed"): 0}


def test_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has an instance id of its own, or the one that it is given."""
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    assert own_resource().attributes["service.instance.id"]
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine")
    assert own_resource().attributes["service.instance.id"] == "mine"
