"""Pushes metrics and log records to an OpenTelemetry collector.

Log records only of jobs without a LoggerProvider of their own. The OTLP exporters of
the SDK read the ``OTEL_*`` variables. Nothing is set globally: what the application
does with OpenTelemetry is not affected.

The OpenTelemetry API has no instrument for a histogram that is counted already, and a
call must not pay for one of its own. So the data that the SDK would aggregate is built
here, from the same snapshots as the Prometheus families (`signals.metrics`).
"""

import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from operator import lt, sub
from typing import Any, Final

from opentelemetry import context
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import ConfigurationError
from tracedstore.common.identity import process_identity
from tracedstore.common.threads import DaemonThread
from tracedstore.export.otel_export import exporter_name
from tracedstore.export.own_exporters import Exports, OwnExporter, own_resource
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.snapshot import Histogram, Snapshots, Values
from tracedstore.signals.spans import process_attributes

_DEFAULT_INTERVAL_MS = 60_000
_DEFAULT_TIMEOUT_MS = 30_000
_TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_SCOPE = InstrumentationScope(names.SCOPE, __version__, names.SCHEMA_URL)
_DELTA = AggregationTemporality.DELTA
_CUMULATIVE = AggregationTemporality.CUMULATIVE


@dataclass(frozen=True, slots=True)
class Temporality:
    """Whether a collector wants what was counted since the last export, or all."""

    counters: AggregationTemporality = _CUMULATIVE
    histograms: AggregationTemporality = _CUMULATIVE


# The metric, and the values of its labels.
_Key = tuple[names.Metric, tuple[str, ...]]
# A number; or nanoseconds and the counts of all buckets.
_Counts = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Reported:
    """What was last reported of one series, and since when it counts."""

    counts: _Counts
    bounds: tuple[int, ...]
    start_ns: int


# By OpenTelemetry's specification. `lowmemory` leaves counters that are read when they
# are collected cumulative.
_TEMPORALITIES: Final = {
    "cumulative": Temporality(),
    "delta": Temporality(counters=_DELTA, histograms=_DELTA),
    "lowmemory": Temporality(histograms=_DELTA),
}


class MetricStream:
    """The metrics as a collector gets them: it keeps what that has been given.

    Counts that are lower than before have started anew.
    """

    def __init__(self, temporality: Temporality) -> None:
        self._temporality = temporality
        self.reset()

    def reset(self) -> None:
        """Forget what was reported, as a forked child must."""
        self.lock = threading.Lock()  # a fork may have copied it locked
        self._began_ns = self._read_ns = 0
        self._reported: dict[_Key, _Reported] = {}
        self._pending: tuple[int, dict[_Key, _Reported]] = (0, {})
        self._target: Mapping[str, str] = {}

    def read(self, snapshots: Snapshots) -> list[Metric]:
        """Return the metrics; the caller holds the lock, and calls `commit` then."""
        recorder = snapshots.recorder
        if self._began_ns != recorder.began_ns:
            self._began_ns = self._read_ns = recorder.began_ns
            self._reported = {}
        now = max(recorder.clock.wall(), self._read_ns + 1)
        self._pending = (now, dict(self._reported))
        self._target = _target_labels()
        values = (*snapshots.take(), snapshots.failures())
        read = map(self._metric, values)
        return [metric for metric in read if metric.data.data_points]

    def commit(self) -> None:
        """Note that the collector has got what was last read."""
        self._read_ns, self._reported = self._pending

    def _metric(self, values: Values) -> Metric:
        metric = values.metric
        data: HistogramData | Sum | Gauge
        if metric.type == "histogram":
            data = HistogramData(
                self._histograms(metric, values.histograms),
                self._temporality.histograms,
            )
        elif metric.type == "counter":
            data = Sum(
                self._sums(values), self._temporality.counters, is_monotonic=True
            )
        else:
            now, _ = self._pending
            data = Gauge(
                [
                    NumberDataPoint(self._attributes(metric, labels), 0, now, number)
                    for labels, number in values.numbers
                ]
            )
        return Metric(metric.otel, metric.help, metric.unit, data)

    def _sums(self, values: Values) -> list[NumberDataPoint]:
        points = []
        for labels, number in values.numbers:
            key = (values.metric, labels)
            counted = self._count(key, (number,), (), self._temporality.counters)
            if counted is not None:
                start, (since_start,) = counted
                points.append(
                    NumberDataPoint(
                        self._attributes(*key), start, self._pending[0], since_start
                    )
                )
        return points

    def _histograms(
        self, metric: names.Metric, histograms: Iterable[Histogram]
    ) -> list[HistogramDataPoint]:
        points = []
        for one in histograms:
            key = (metric, one.labels)
            counts = (one.nanoseconds, *one.counts)
            counted = self._count(key, counts, one.bounds, self._temporality.histograms)
            if counted is None:
                continue
            start, (nanoseconds, *buckets) = counted
            points.append(
                HistogramDataPoint(
                    attributes=self._attributes(*key),
                    start_time_unix_nano=start,
                    time_unix_nano=self._pending[0],
                    count=int(sum(buckets)),
                    sum=nanoseconds / 1e9,
                    bucket_counts=[int(count) for count in buckets],
                    explicit_bounds=[bound / 1e9 for bound in one.bounds],
                    # Not counted; OTLP leaves them out.
                    min=None,  # type: ignore[arg-type]
                    max=None,  # type: ignore[arg-type]
                    exemplars=self._exemplars(one),
                )
            )
        return points

    def _count(
        self,
        key: _Key,
        counts: _Counts,
        bounds: tuple[int, ...],
        temporality: AggregationTemporality,
    ) -> tuple[int, _Counts] | None:
        """Return since when to report what; None if a delta has nothing to report."""
        last = self._reported.get(key)
        begins = last is None
        if last is None:
            last = _Reported((), bounds, self._began_ns)
        same = last.bounds == bounds
        # A series that begins has no counts here to compare with.
        restarted = same and any(map(lt, counts, last.counts))
        start = self._read_ns if restarted else last.start_ns
        _, pending = self._pending
        pending[key] = _Reported(counts, bounds, start)
        if temporality is _CUMULATIVE:
            return start, counts
        if begins or restarted:
            return self._read_ns, counts
        if not same:
            # After `configure(metrics=...)`: what lies between is not known by these
            # bounds, and must not be counted twice.
            return None
        delta = tuple(map(sub, counts, last.counts))
        return (self._read_ns, delta) if any(delta) else None

    def _attributes(
        self, metric: names.Metric, labels: tuple[str, ...]
    ) -> Mapping[str, str]:
        given = zip(metric.labels, labels, strict=True)
        return {**self._target, **{label: value for label, value in given if value}}

    def _exemplars(self, histogram: Histogram) -> list[Exemplar]:
        """Return the exemplars since the last collection."""
        return [
            Exemplar(
                filtered_attributes={},
                value=one.seconds,
                time_unix_nano=int(one.ended * 1e9),
                span_id=int(one.span_id, 16),
                trace_id=int(one.trace_id, 16),
            )
            for one in histogram.exemplars
            if one is not None and one.ended * 1e9 >= self._read_ns
        ]


# What the collector was given: it stays after a `shutdown`, as the counts do.
_streams: dict[Temporality, MetricStream] = {}


def _new_exporter(signal: str, setting: str) -> Any:
    name = exporter_name(signal)
    for found in entry_points(group=f"opentelemetry_{signal}_exporter", name=name):
        return found.load()()
    raise ConfigurationError(
        f"{setting} is 'otlp', and the exporter {name!r} is not installed; install it"
        " (http/protobuf: pip install 'tracedstore[otlp]', grpc: pip install"
        " opentelemetry-exporter-otlp-proto-grpc), or choose another value"
    )


class PeriodicExport:
    """Exports the metrics of this process in an interval, from a thread of its own.

    Unlike the SDK's reader, a forked child gets a connection of its own, and what
    could not be delivered as a delta is in the next one.

    Raises:
        ConfigurationError: There is no exporter, or a variable has an unusable value.
    """

    def __init__(self) -> None:
        self._interval = _milliseconds(
            "OTEL_METRIC_EXPORT_INTERVAL", _DEFAULT_INTERVAL_MS
        )
        self._timeout = _milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", _DEFAULT_TIMEOUT_MS)
        temporality = _temporality()
        self._stream = _streams.setdefault(temporality, MetricStream(temporality))
        self._connection: _Connection | None = _Connection()
        self._snapshots: Snapshots | None = None
        self._thread: DaemonThread | None = None
        self._ended = threading.Event()

    def start(self, snapshots: Snapshots) -> None:
        """Export from now on; a second call only replaces what is exported."""
        self._snapshots = snapshots
        if self._thread is not None:
            return
        thread = DaemonThread(self._run, name="tracedstore-otlp")
        thread.start()
        self._thread = thread

    def flush(self) -> None:
        """Export now; returns when the collector has responded, or the timeout ends.

        What could not be delivered is in the next export.
        """
        with self._stream.lock:
            if self._snapshots is None:
                return
            self._connection = self._connection or _Connection()
            read = self._stream.read(self._snapshots)
            result = self._connection.export(read, self._timeout)
            if result is MetricExportResult.SUCCESS:
                self._stream.commit()

    def end(self) -> None:
        """Export once more, and no more then; see `flush`."""
        self._ended.set()
        try:
            self.flush()
        finally:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.exporter.shutdown()

    def reset(self) -> None:
        """Leave the connection to the parent, as a forked child must.

        The child's first Store call starts the exports again.
        """
        self._stream.reset()
        self._connection = self._thread = None
        self._ended = threading.Event()

    def _run(self) -> None:
        RECORDER.failures.guarded(names.OTEL_METRICS, self._connect)
        while not self._ended.wait(self._interval / 1000):
            RECORDER.failures.guarded(names.OTEL_METRICS, self.flush)

    def _connect(self) -> None:
        """Connect a forked child. The SDK cannot do that while the process ends."""
        with self._stream.lock:
            if not self._ended.is_set():
                self._connection = self._connection or _Connection()


class _Connection:
    """An exporter, and the resource of this process."""

    def __init__(self) -> None:
        self.exporter: MetricExporter = _new_exporter(
            "metrics", "TRACEDSTORE_METRICS_EXPORTER"
        )
        self._exports = Exports("metrics", self.exporter, loses=False)
        self._resource = own_resource()

    def export(
        self, metrics: Sequence[Metric], timeout_millis: float
    ) -> MetricExportResult | None:
        # The rank may have become known by now.
        attributes = process_attributes(process_identity())
        resource = self._resource.merge(Resource(attributes))
        scope = ScopeMetrics(_SCOPE, metrics, names.SCHEMA_URL)
        data = MetricsData([ResourceMetrics(resource, [scope], resource.schema_url)])
        # Instrumentations of HTTP clients must not trace the exporter.
        token = context.attach(context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            exported: MetricExportResult | None = self._exports.run(
                partial(self.exporter.export, data, timeout_millis=timeout_millis)
            )
            return exported
        finally:
            context.detach(token)


def new_logger_provider() -> LoggerProvider:
    """Return a LoggerProvider that sends log records to a collector.

    Raises:
        ConfigurationError: There is no exporter.
    """
    exporter = _new_exporter("logs", "TRACEDSTORE_EVENTS_EXPORTER")
    # `export.setup` ends it within ``exit_timeout``.
    provider = LoggerProvider(own_resource(), shutdown_on_exit=False)
    own: Any = OwnExporter("logs", exporter)
    provider.add_log_record_processor(BatchLogRecordProcessor(own))
    return provider


def _milliseconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        number = float(text or default)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigurationError(
            f"{variable} is {text!r}; accepted is a number of milliseconds above 0"
        )
    return number


def _temporality() -> Temporality:
    text = os.environ.get(_TEMPORALITY, "").strip()
    temporality = _TEMPORALITIES.get(text.lower() or "cumulative")
    if temporality is None:
        raise ConfigurationError(
            f"{_TEMPORALITY} is {text!r}; accepted is one of"
            f" {', '.join(_TEMPORALITIES)}"
        )
    return temporality


def _target_labels() -> dict[str, str]:
    """Return what service discovery makes labels of, as attributes of each point.

    Prometheus has the attributes of a resource in a series of their own.
    """
    identity = process_identity()
    labels = {
        "run_id": identity.run_id,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "host": identity.host,
    }
    return {name: str(value) for name, value in labels.items() if value is not None}
