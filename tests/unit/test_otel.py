"""The instrumentor that opentelemetry-instrument finds."""

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tracedstore.auto import otel, patches
from tracedstore.auto.otel import TracedStoreInstrumentor


def file_store(folder: Path) -> dist.Store:
    """What torch makes for file://."""
    store, _, _ = next(dist.rendezvous(f"file://{folder / 'store'}", 0, 1))
    assert isinstance(store, dist.Store)
    return store


class TestInstrumentor:
    """It does what tracedstore.instrument() does."""

    def test_entry_point(self) -> None:
        """It is found by its group and name."""
        (found,) = entry_points(group="opentelemetry_instrumentor", name="torch_store")

        assert found.load() is TracedStoreInstrumentor
        (base,) = TracedStoreInstrumentor.__bases__
        assert base.__module__ == "opentelemetry.instrumentation.instrumentor"

    def test_there_and_back(self, tmp_path: Path) -> None:
        """As the loader calls it, and as its users do."""
        instrumentor = TracedStoreInstrumentor()

        instrumentor.instrument(skip_dep_check=True)
        traced = type(file_store(tmp_path)).__name__
        instrumentor.uninstrument()
        bare = type(file_store(tmp_path)).__name__
        instrumentor.instrument()
        again = patches._on
        instrumentor.uninstrument()

        assert (traced, bare, again, patches._on) == (
            "TracedStore",
            "FileStore",
            True,
            False,
        )

    def test_a_provider_of_the_jobs(
        self, provider: TracerProvider, spans: InMemorySpanExporter, tmp_path: Path
    ) -> None:
        """Spans go where the job says."""
        TracedStoreInstrumentor().instrument(tracer_provider=provider)

        file_store(tmp_path).set("key", "value")
        TracedStoreInstrumentor().uninstrument()

        assert [span.name for span in spans.get_finished_spans()] == [
            "set tracedstore/RANKS/*",
            "set key",
        ]

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The module can be imported by anybody."""
        monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation", None)
        monkeypatch.setitem(
            sys.modules, "opentelemetry.instrumentation.instrumentor", None
        )
        source = Path(otel.__file__).read_text()
        namespace = {"__name__": "a copy"}

        exec(compile(source, otel.__file__, "exec"), namespace)

        assert "TracedStoreInstrumentor" in namespace
