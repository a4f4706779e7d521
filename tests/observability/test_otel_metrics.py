"""Metrics as OpenTelemetry's data, as a collector gets them."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import DistStoreError, HashStore

import tracedstore
from support.otel_metrics import TARGET, Distribution, Stream, exposed, without_target
from tracedstore import names
from tracedstore.elastic import barrier
from tracedstore.export import setup
from tracedstore.export.otlp import MetricStream, Temporality
from tracedstore.recording.recorder import RECORDER

DELTA = AggregationTemporality.DELTA
DURATION = names.OPERATION_DURATION.otel
WAIT = names.WAIT_DURATION.otel


class Reader:
    """Reads the metrics of this process, as each export does."""

    def __init__(self, temporality: Temporality) -> None:
        self._stream = MetricStream(temporality)

    def collect(self) -> list[Metric]:
        """Return what is to be exported since the last collection."""
        assert setup._process.telemetry is not None
        with self._stream.lock:
            metrics = self._stream.read(setup._process.telemetry._pushed)
            self._stream.commit()
        return metrics


def use(store: tracedstore.TracedStore, times: int = 1) -> None:
    """Make calls of all kinds."""
    for number in range(times):
        store.set(f"key/{number}", "value")
        store.get(f"key/{number}")
        store.add("counter", 1)
        store.compare_set("swap", "no", "yes")
        barrier(store, 1, f"barrier/{number}", 5)
        with pytest.raises(DistStoreError):
            store.wait(["never"], timedelta(milliseconds=2))


def stream_of(metric: Metric, point: Any) -> Stream:
    """Return what tells a data point from others."""
    return metric.name, without_target(point.attributes)


class Totals:
    """Adds data points up."""

    def __init__(self) -> None:
        self.numbers: dict[Stream, float] = {}
        self.histograms: dict[Stream, Distribution] = {}

    def add(self, metrics: list[Metric], *, gauges: bool = True) -> None:
        """Add the points of a collection."""
        for metric in metrics:
            for point in metric.data.data_points:
                stream = stream_of(metric, point)
                if isinstance(point, HistogramDataPoint):
                    total = self.histograms.setdefault(stream, Distribution())
                    assert point.count == sum(point.bucket_counts)
                    total.add(point.explicit_bounds, point.bucket_counts, point.sum)
                elif gauges or hasattr(metric.data, "is_monotonic"):
                    assert isinstance(point, NumberDataPoint)
                    before = self.numbers.get(stream, 0)
                    self.numbers[stream] = before + point.value


@pytest.fixture
def reader() -> Reader:
    """A reader of all that was counted."""
    return Reader(Temporality())


@pytest.fixture
def deltas() -> Reader:
    """A reader of deltas."""
    return Reader(Temporality(counters=DELTA, histograms=DELTA))


@pytest.fixture
def configure(registry: CollectorRegistry) -> Callable[..., tracedstore.TracedStore]:
    """Return a function that configures telemetry, and wraps a store."""

    def run(**settings: Any) -> tracedstore.TracedStore:
        tracedstore.configure(registry=registry, **{"log_format": "off", **settings})
        return tracedstore.wrap(HashStore())

    return run


class TestNames:
    """The names of metrics."""

    @pytest.mark.parametrize(
        "metric", [one for one in names.METRICS if one.unit], ids=lambda one: one.name
    )
    def test_translated(self, metric: names.Metric) -> None:
        """What Prometheus makes of a name is the name of the exposition.

        The rules are those of Prometheus 3, with which a receiver is configured if
        nothing is said. They were compared with its translator once (docs/otlp.md).
        """
        assert not names.WORKER_UP.unit  # only agents have it, and they are scraped
        tokens = re.findall(r"[a-z0-9]+", metric.otel)
        unit = {"s": "seconds", "By": "bytes"}.get(metric.unit)
        if unit is None:
            assert re.fullmatch(r"{[a-z]+}", metric.unit)  # annotations are dropped
        elif unit not in tokens:
            tokens.append(unit)
        if metric.type == "counter":
            tokens = [*(one for one in tokens if one != "total"), "total"]
        assert "_".join(tokens) == metric.name


class TestValues:
    """What readers get."""

    @pytest.mark.parametrize("metrics", ["compact", "full"])
    def test_same_as_prometheus(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        registry: CollectorRegistry,
        reader: Reader,
        metrics: str,
    ) -> None:
        """Numbers, buckets and attributes are those of the Prometheus exposition."""
        store = configure(metrics=metrics)
        use(store, 3)
        totals = Totals()

        totals.add(reader.collect())

        numbers, histograms = exposed(registry.collect())
        assert totals.numbers == numbers
        assert set(totals.histograms) == set(histograms)
        for stream, histogram in histograms.items():
            assert totals.histograms[stream].agrees(histogram), stream
        operations = {dict(stream[1]).get("operation") for stream in histograms}
        assert {"set", "get", "add", "compare_set"} <= operations

    def test_durations(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        reader: Reader,
    ) -> None:
        """A point has the labels of its series and of its target."""
        use(configure(), 2)

        (metric,) = [one for one in reader.collect() if one.name == WAIT]

        assert metric.unit == "s"
        (point,) = [
            one
            for one in metric.data.data_points
            if "error_type" in (one.attributes or {})
        ]
        assert point.attributes is not None
        assert point.count == 2  # type: ignore[union-attr]
        assert without_target(point.attributes) == {
            ("store", "hash_store"),
            ("operation", "wait"),
            ("error_type", "timeout"),
        }
        assert {"host"} <= point.attributes.keys() & TARGET

    def test_delta(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        reader: Reader,
        deltas: Reader,
    ) -> None:
        """Deltas add up to the cumulative counts; their times leave no gap."""
        store = configure()
        added = Totals()
        began = RECORDER.began_ns
        last_read = began
        for calls in (2, 0, 3):
            use(store, calls)
            if calls == 3:
                store = configure()  # keeps what readers were given
            collected = deltas.collect()
            added.add(collected, gauges=False)
            points = [
                point
                for metric in collected
                if getattr(metric.data, "aggregation_temporality", None) is DELTA
                for point in metric.data.data_points
            ]
            assert bool(points) == bool(calls)
            assert {point.start_time_unix_nano for point in points} <= {last_read}
            last_read = _time_of(collected)
        everything = Totals()

        collected = reader.collect()

        everything.add(collected, gauges=False)
        assert added.numbers == everything.numbers
        assert set(added.histograms) == set(everything.histograms)
        for stream, histogram in everything.histograms.items():
            assert added.histograms[stream].agrees(histogram), stream
        starts = {
            point.start_time_unix_nano
            for metric in collected
            if hasattr(metric.data, "aggregation_temporality")
            for point in metric.data.data_points
        }
        assert starts == {began}

    def test_counts_that_begin_anew(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        reader: Reader,
        deltas: Reader,
    ) -> None:
        """After a reset, as in a forked child, counts start from zero, at its time."""
        store = configure()
        use(store, 3)
        for one in (reader, deltas):
            one.collect()
        RECORDER.reset()
        store.add("counter", 1)

        for one in (reader, deltas):
            (metric,) = [metric for metric in one.collect() if metric.name == DURATION]
            (point,) = metric.data.data_points

            assert point.count == 1  # type: ignore[union-attr]
            assert point.start_time_unix_nano == RECORDER.began_ns

    def test_exemplars(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        deltas: Reader,
    ) -> None:
        """A bucket has the span of a call since the last collection."""
        store = configure(tracer_provider=provider, spans="all")
        store.add("counter", 1)

        collected = [deltas.collect(), deltas.collect()]

        (span,) = spans.get_finished_spans()
        exemplars = [
            (one.trace_id, one.span_id)
            for metrics in collected
            for metric in metrics
            for point in metric.data.data_points
            for one in point.exemplars
        ]
        assert span.context is not None
        assert exemplars == [(span.context.trace_id, span.context.span_id)]


def _time_of(metrics: list[Metric]) -> int:
    (time,) = {
        point.time_unix_nano for one in metrics for point in one.data.data_points
    }
    return int(time)
