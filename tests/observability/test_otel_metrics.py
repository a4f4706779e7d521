"""Metrics in the application's OpenTelemetry MeterProvider."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter, NoOpMeterProvider
from opentelemetry.sdk.metrics import (
    Counter,
    Histogram,
    MeterProvider,
    ObservableCounter,
)
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    NumberDataPoint,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import DistStoreError, HashStore

import tracedstore
from support.otel_metrics import Distribution, Stream, exposed
from tracedstore import names, otel_names
from tracedstore.elastic import barrier
from tracedstore.recording.recorder import RECORDER

DELTA = AggregationTemporality.DELTA
DURATION = "db.client.operation.duration"


def delta_reader() -> InMemoryMetricReader:
    """Return a reader that wants deltas."""
    kinds: dict[type, AggregationTemporality] = dict.fromkeys(
        (Counter, ObservableCounter, Histogram), DELTA
    )
    return InMemoryMetricReader(preferred_temporality=kinds)


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


def ours(data: MetricsData | None) -> list[Metric]:
    """Return the metrics of this package, which are the last of a collection."""
    assert data is not None
    (scope,) = data.resource_metrics[-1].scope_metrics
    assert (scope.scope.name, scope.schema_url) == (
        "tracedstore",
        otel_names.SCHEMA_URL,
    )
    return list(scope.metrics)


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
def reader() -> InMemoryMetricReader:
    """A reader of `meters`, cumulative."""
    return InMemoryMetricReader()


@pytest.fixture
def deltas() -> InMemoryMetricReader:
    """A reader of `meters`, with deltas."""
    return delta_reader()


@pytest.fixture
def meters(
    reader: InMemoryMetricReader, deltas: InMemoryMetricReader
) -> Iterator[MeterProvider]:
    """The application's MeterProvider, with two readers."""
    provider = MeterProvider(
        [reader, deltas], Resource({"service.name": "job"}), shutdown_on_exit=False
    )
    yield provider
    provider.shutdown()


@pytest.fixture
def configure(
    registry: CollectorRegistry, meters: MeterProvider
) -> Callable[..., tracedstore.TracedStore]:
    """Return a function that configures telemetry with `meters`, and wraps a store."""

    def run(**settings: Any) -> tracedstore.TracedStore:
        tracedstore.configure(
            registry=registry,
            meter_provider=meters,
            **{"log_format": "off", **settings},
        )
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
        instruments = [otel_names.INSTRUMENTS[metric].name for metric in own]

        assert set(otel_names.INSTRUMENTS) == set(own)
        assert set(otel_names.ATTRIBUTES) == labels
        assert len(set(otel_names.ATTRIBUTES.values())) == len(labels)
        assert len(set(instruments)) == len(instruments) - 1
        # A name that is an attribute as well would be ambiguous in a query.
        assert not set(instruments) & {
            *names.ATTRIBUTES,
            *otel_names.ATTRIBUTES.values(),
        }


class TestValues:
    """What readers get."""

    @pytest.mark.parametrize("metrics", ["compact", "full"])
    def test_same_as_prometheus(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        registry: CollectorRegistry,
        reader: InMemoryMetricReader,
        metrics: str,
    ) -> None:
        """Numbers, buckets and attributes are those of the Prometheus exposition."""
        store = configure(metrics=metrics)
        use(store, 3)
        totals = Totals()

        totals.add(ours(reader.get_metrics_data()))

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
        reader: InMemoryMetricReader,
    ) -> None:
        """One histogram has all calls, with the same bounds, and errors by type."""
        use(configure(), 2)

        (metric,) = [
            one for one in ours(reader.get_metrics_data()) if one.name == DURATION
        ]

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
        reader: InMemoryMetricReader,
        deltas: InMemoryMetricReader,
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
            collected = ours(deltas.get_metrics_data())
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

        collected = ours(reader.get_metrics_data())

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
        reader: InMemoryMetricReader,
        deltas: InMemoryMetricReader,
    ) -> None:
        """After a reset, as in a forked child, counts start from zero, at its time."""
        store = configure()
        use(store, 3)
        for one in (reader, deltas):
            one.get_metrics_data()
        RECORDER.reset()
        store.add("counter", 1)

        for one in (reader, deltas):
            (metric,) = [
                metric
                for metric in ours(one.get_metrics_data())
                if metric.name == DURATION
            ]
            (point,) = metric.data.data_points

            assert point.count == 1  # type: ignore[union-attr]
            assert point.start_time_unix_nano == RECORDER.began_ns

    def test_exemplars(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        deltas: InMemoryMetricReader,
    ) -> None:
        """A bucket has the span of a call since the last collection."""
        store = configure(tracer_provider=provider, spans="all")
        store.add("counter", 1)

        collected = [ours(deltas.get_metrics_data()), ours(deltas.get_metrics_data())]

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


class TestProvider:
    """The application's provider and its readers."""

    def test_application_metrics(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        meters: MeterProvider,
        reader: InMemoryMetricReader,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """They come first, unchanged. Ours have the rank in their resource besides."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "job-7")
        monkeypatch.setenv("TRACEDSTORE_POD_NAME", "node")
        configure().add("counter", 1)
        meters.get_meter("theirs").create_counter("steps").add(5)

        data = reader.get_metrics_data()

        assert data is not None
        theirs, mine = data.resource_metrics
        assert [one.scope.name for one in theirs.scope_metrics] == ["theirs"]
        assert dict(theirs.resource.attributes) == {"service.name": "job"}
        assert dict(mine.resource.attributes) == {
            "service.name": "job",
            "tracedstore.rank": 3,
            "tracedstore.run_id": "job-7",
            "host.name": "node",
        }

    def test_late_reader(
        self, configure: Callable[..., tracedstore.TracedStore], meters: MeterProvider
    ) -> None:
        """A reader that is added later gets all from its first collection on."""
        configure().add("counter", 1)
        late = delta_reader()
        meters.add_metric_reader(late)

        metrics = ours(late.get_metrics_data())

        assert DURATION in {metric.name for metric in metrics}

    def test_prometheus_reader(
        self, configure: Callable[..., tracedstore.TracedStore], meters: MeterProvider
    ) -> None:
        """A reader that serves Prometheus would expose the same names twice."""

        class PrometheusMetricReader(InMemoryMetricReader):
            """Named as the SDK's."""

        prometheus = PrometheusMetricReader()
        meters.add_metric_reader(prometheus)
        configure().add("counter", 1)

        metrics = ours(prometheus.get_metrics_data())

        assert [metric.name for metric in metrics] == [otel_names.ACTIVE.name]

    @pytest.mark.parametrize("how", ["prometheus", "disabled", "shutdown"])
    def test_off(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        reader: InMemoryMetricReader,
        how: str,
    ) -> None:
        """The provider gets nothing if it is not wanted, or no more."""
        configure().add("counter", 1)
        assert reader.get_metrics_data() is not None
        if how == "shutdown":
            tracedstore.shutdown()
        elif how == "disabled":
            configure(disabled=True)
        else:
            configure(metrics_exporter="prometheus")
        reader.get_metrics_data()  # what shutdown() flushed

        assert reader.get_metrics_data() is None

    def test_failure(
        self,
        configure: Callable[..., tracedstore.TracedStore],
        meters: MeterProvider,
        reader: InMemoryMetricReader,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The application's metrics do not depend on ours."""
        configure().add("counter", 1)
        meters.get_meter("theirs").create_counter("steps").add(5)
        monkeypatch.delattr("tracedstore.recording.counters.CountersByThread.sums")

        data = reader.get_metrics_data()

        assert data is not None
        assert len(data.resource_metrics) == 1
        assert RECORDER.failures.counts() == {"otel_metrics": 1}

    def test_other_provider(self, registry: CollectorRegistry) -> None:
        """A provider that is not the SDK's is reported once, when it collects."""
        found: list[Any] = []

        class Other(NoOpMeterProvider):
            """Collects by itself."""

            def get_meter(self, *_args: Any, **_kwargs: Any) -> Any:
                return OtherMeter("")

        class OtherMeter(NoOpMeter):
            def create_observable_gauge(
                self,
                name: str,
                callbacks: Any = None,
                unit: str = "",
                description: str = "",
            ) -> Any:
                found.extend(callbacks)

        other = Other()
        tracedstore.configure(registry=registry, meter_provider=other, log_format="off")
        (callback,) = found

        values = [[one.value for one in callback(None)] for _ in range(2)]

        assert values == [[1], [1]]
        assert RECORDER.failures.counts() == {"otel_metrics": 1}
