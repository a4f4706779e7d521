"""Failures of the telemetry itself, which never reach the job."""

import io
import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from prometheus_client import CollectorRegistry, generate_latest
from torch.distributed import HashStore

import tracedstore
from integration.harness import wait_until
from support.metrics import exported_calls
from tracedstore.recording.counters import SeriesTable
from tracedstore.recording.recorder import RECORDER, Clock
from tracedstore.testing import FlakyStore


def use(store: tracedstore.TracedStore) -> None:
    """Call the store as a job does, and check the results."""
    for number in range(3):
        store.set(f"key/{number}", "value")
        assert store.get(f"key/{number}") == b"value"
        assert store.check([f"key/{number}"])
        assert store.compare_set("swap", "expected", "desired") == b"expected"
        with pytest.raises(TypeError):
            store.set("too few")  # type: ignore[call-arg]


def failures(registry: CollectorRegistry) -> dict[str, float]:
    """Return tracedstore_telemetry_failures_total by observer, without zeros."""
    return {
        sample.labels["observer"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tracedstore_telemetry_failures_total" and sample.value
    }


class TestBrokenParts:
    """A failure disables one part of the telemetry, and the others keep working."""

    def test_span_processor(
        self, registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A processor that raises disables spans, counted and reported once."""

        class Broken(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                raise OSError("pipe closed")

        provider = TracerProvider()
        provider.add_span_processor(Broken())
        tracedstore.configure(registry=registry, tracer_provider=provider)

        use(tracedstore.wrap(HashStore()))

        assert failures(registry) == {"spans": 1}
        assert capsys.readouterr().err.count("telemetry.disabled") == 1

    def test_exporter(self, registry: CollectorRegistry) -> None:
        """The SDK handles an exporter that raises; nothing reaches the job."""

        class Broken(SpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                raise OSError("collector gone")

        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(Broken()))
        tracedstore.configure(
            registry=registry, tracer_provider=provider, log_format="off"
        )

        use(tracedstore.wrap(HashStore()))

        assert failures(registry) == {}

    def test_log_sink(
        self, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A log that cannot be written disables events; metrics keep working."""

        class Full(io.StringIO):
            def write(self, _text: str) -> int:
                raise OSError("no space left on device")

        structlog.configure(logger_factory=structlog.WriteLoggerFactory(Full()))
        tracedstore.configure(registry=registry, slow_after=0, spans="off")

        use(tracedstore.wrap(HashStore()))
        wait_until(lambda: failures(registry))

        # Lines that were queued before the first one failed may fail as well.
        assert failures(registry).keys() == {"events"}
        assert caplog.text.count("no space left on device") == 1
        calls = exported_calls(registry.collect())
        assert calls["hash_store", "get", ""] == 3

    def test_standard_error_is_closed(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A closed standard error, as in some daemons, disables events."""
        closed = io.StringIO()
        closed.close()
        tracedstore.configure(registry=registry, slow_after=0, spans="off")
        store = tracedstore.wrap(HashStore())
        monkeypatch.setattr(sys, "stderr", closed)

        use(store)
        wait_until(lambda: failures(registry))

        monkeypatch.undo()
        # Lines that were queued before the first one failed may fail as well.
        assert failures(registry).keys() == {"events"}

    @pytest.mark.parametrize("after", [0, 1, 2, 3])
    def test_clock(
        self,
        registry: CollectorRegistry,
        capsys: pytest.CaptureFixture[str],
        after: int,
    ) -> None:
        """A clock that raises, before or after a call, disables recording."""
        readings = iter(range(after))

        def ticks() -> int:
            for reading in readings:
                return reading
            raise OSError("no clock")

        tracedstore.configure(
            registry=registry, clock=Clock(ticks=ticks), stall_after=0, spans="off"
        )

        use(tracedstore.wrap(HashStore()))

        assert RECORDER.failures.counts()["recording"] == 1
        assert "telemetry.disabled" in capsys.readouterr().err

    def test_collector(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A scrape returns the application's metrics when our collector fails."""
        from prometheus_client import Counter

        Counter("job_steps", "Steps of the job.", registry=registry).inc()
        tracedstore.configure(registry=registry, log_format="off")
        use(tracedstore.wrap(HashStore()))

        def broken(_table: SeriesTable) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(SeriesTable, "all", broken)

        for _ in range(2):
            text = generate_latest(registry).decode()
            assert "job_steps_total 1.0" in text
            assert 'telemetry_failures_total{observer="metrics"} 1.0' in text
            assert "operation_duration" not in text

    def test_thread_cannot_start(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything else works if the stall watch cannot start its threads."""
        import threading

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        tracedstore.configure(registry=registry, log_format="off", spans="off")
        monkeypatch.setattr(threading.Thread, "start", fail)
        # The native base starts them when a store is wrapped.
        store = tracedstore.wrap(HashStore())

        use(store)

        assert failures(registry) == {"inflight": 1, "diagnosis": 1}
        tracedstore.shutdown()


class TestUnusualInput:
    """Keys of any kind are escaped in events, and values never appear in them."""

    @pytest.mark.parametrize(
        "value", ["", b"", b"\x00\xff\xfe", "ß€😀", b"x" * 10_000_000]
    )
    @pytest.mark.parametrize("key", ["", "ä€😀", "a\nb\x00c", "k" * 100_000])
    def test_round_trip(
        self, registry: CollectorRegistry, events: Any, key: str, value: str | bytes
    ) -> None:
        """Empty, binary, non-ASCII and 10 MB values are returned; events parse."""
        tracedstore.configure(registry=registry, slow_after=0, spans="off")
        store = tracedstore.wrap(HashStore())
        expected = value.encode() if isinstance(value, str) else value

        store.set(key, value)  # type: ignore[arg-type]

        assert store.get(key) == expected
        (event,) = events()
        assert len(event["key"]) <= 256
        if value:
            assert repr(value)[1:-1][:1000] not in repr(event)
        read = registry.get_sample_value(
            "tracedstore_value_bytes_total",
            {"store": "hash_store", "operation": "get"},
        )
        assert read == len(expected)

    def test_undecodable_key(self, registry: CollectorRegistry, events: Any) -> None:
        """A key that is not UTF-8 is escaped in the event."""
        tracedstore.configure(registry=registry, slow_after=0, spans="off")
        store: Any = tracedstore.wrap(HashStore())

        store.set(b"\xff\xfe", "value")

        assert store.get(b"\xff\xfe") == b"value"
        assert events()[0]["key"] == "\\xff\\xfe"


class TestManyKeys:
    """The cost does not grow with the number of keys."""

    # A store in Python: there is one base for it.
    @pytest.mark.parametrize("core", ["python"], indirect=True)
    def test_bounded(self, registry: CollectorRegistry) -> None:
        """Exposition and memory do not grow from 1,000 keys to 100,000."""
        tracedstore.configure(
            registry=registry, slow_after=0, log_format="off", spans="off"
        )
        # check() stores nothing in the inner store.
        store = tracedstore.wrap(FlakyStore(HashStore()))
        letters = "abcdefghijklmnopqrstuvwxyz"

        def use_keys(start: int, stop: int) -> None:
            for number in range(start, stop):
                family = "".join(letters[int(digit)] for digit in str(number))
                store.check([f"{family}/{number}"])

        use_keys(0, 1_000)
        size = len(generate_latest(registry))
        tracemalloc.start()
        use_keys(1_000, 2_000)
        before, _ = tracemalloc.get_traced_memory()
        use_keys(2_000, 100_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert abs(len(generate_latest(registry)) - size) < 1_000
        assert after - before < 100_000
