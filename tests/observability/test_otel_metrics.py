"""Metrics as OpenTelemetry's data, as a collector gets them."""

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
from opentelemetry.semconv.attributes import db_attributes, error_attributes
from opentelemetry.semconv.metrics import db_metrics
from prometheus_client import CollectorRegistry
from torch.distributed import DistStoreError, HashStore

import tracedstore
from support.otel_metrics import Distribution, Stream, exposed
from tracedstore import names
from tracedstore.elastic import barrier
from tracedstore.export import setup
from tracedstore.export.otlp import MetricStream, Temporality
from tracedstore.recording.recorder import RECORDER

DELTA = AggregationTemporality.DELTA
DURATION = "db.client.operation.duration"


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
    return metric.name, frozenset(point.attributes.items())


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

    def test_every_metric_has_one(self) -> None:
        """Every metric and label of a process has a name of its own.

        But for the two histograms of calls, which are one in OpenTelemetry.
        """
        # The endpoint of a node adds the other one.
        own = [metric for metric in names.METRICS if metric != names.WORKER_UP]
        labels = {label for metric in own for label in metric.labels}
        instruments = [metric.otel for metric in own]

        assert all(metric.otel and metric.unit for metric in own)
        assert set(names.LABEL_ATTRIBUTES) == labels
        assert len(set(names.LABEL_ATTRIBUTES.values())) == len(labels)
        assert len(set(instruments)) == len(instruments) - 1
        # A name that is an attribute as well would be ambiguous in a query.
        assert not set(instruments) & {
            *names.ATTRIBUTES,
            *names.LABEL_ATTRIBUTES.values(),
        }

    def test_names_of_the_conventions(self) -> None:
        """They are spelled as in OpenTelemetry's package."""
        assert names.OPERATION_DURATION.otel == db_metrics.DB_CLIENT_OPERATION_DURATION
        assert names.DB_SYSTEM == db_attributes.DB_SYSTEM_NAME
        assert {
            db_attributes.DB_OPERATION_NAME,
            error_attributes.ERROR_TYPE,
        } < set(names.LABEL_ATTRIBUTES.values())


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
        operations = {dict(stream[1]).get("db.operation.name") for stream in histograms}
        assert {"set", "get", "add", "compare_set"} <= operations

    def test_durations(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        reader: Reader,
    ) -> None:
        """One histogram has all calls, with the same bounds, and errors by type."""
        use(configure(), 2)

        (metric,) = [one for one in reader.collect() if one.name == DURATION]

        assert metric.unit == "s"
        assert len({tuple(one.explicit_bounds) for one in metric.data.data_points}) == 1  # type: ignore[union-attr]
        totals = Totals()
        totals.add([metric])
        failed = (
            DURATION,
            frozenset(
                {
                    ("db.system.name", "pytorch.hash_store"),
                    ("tracedstore.store", "hash_store"),
                    ("db.operation.name", "wait"),
                    ("error.type", "timeout"),
                }
            ),
        )
        assert totals.histograms[failed].count == 2

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
