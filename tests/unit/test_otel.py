"""The instrumentor that opentelemetry-instrument loads."""

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
    """Return the store that torch creates for file://."""
    store, _, _ = next(dist.rendezvous(f"file://{folder / 'store'}", 0, 1))
    assert isinstance(store, dist.Store)
    return store


class TestInstrumentor:
    """The instrumentor does the same as tracedstore.instrument()."""

    def test_entry_point(self) -> None:
        """The entry point has the instrumentor's group and name."""
        (entry,) = entry_points(group="opentelemetry_instrumentor", name="torch_store")

        assert entry.load() is TracedStoreInstrumentor
        (base,) = TracedStoreInstrumentor.__bases__
        assert base.__module__ == "opentelemetry.instrumentation.instrumentor"

    def test_instrument_and_uninstrument(self, tmp_path: Path) -> None:
        """Both take effect, as the loader calls them and as users do."""
        instrumentor = TracedStoreInstrumentor()

        instrumentor.instrument(skip_dep_check=True)
        traced = type(file_store(tmp_path)).__name__
        instrumentor.uninstrument()
        bare = type(file_store(tmp_path)).__name__
        instrumentor.instrument()
        again = patches._enabled
        instrumentor.uninstrument()

        assert (traced, bare, again, patches._enabled) == (
            "TracedStore",
            "FileStore",
            True,
            False,
        )

    def test_tracer_provider(
        self, provider: TracerProvider, spans: InMemorySpanExporter, tmp_path: Path
    ) -> None:
        """Spans go to the provider that the job passes."""
        TracedStoreInstrumentor().instrument(tracer_provider=provider)

        file_store(tmp_path).set("key", "value")
        TracedStoreInstrumentor().uninstrument()

        assert [span.name for span in spans.get_finished_spans()] == [
            "set tracedstore/RANKS/*",
            "set key",
        ]

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The module can be imported without OpenTelemetry's package."""
        monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation", None)
        monkeypatch.setitem(
            sys.modules, "opentelemetry.instrumentation.instrumentor", None
        )
        source = Path(otel.__file__).read_text()
        namespace = {"__name__": "a copy"}

        exec(compile(source, otel.__file__, "exec"), namespace)

        assert "TracedStoreInstrumentor" in namespace
