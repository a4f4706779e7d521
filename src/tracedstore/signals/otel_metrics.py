"""Turns snapshots of the counters into OpenTelemetry's metric data.

The OpenTelemetry API has no instrument for a histogram that is counted already, and a
call must not pay for one of its own. So the data that the SDK would aggregate is built
here, from the same snapshots as the Prometheus families (`signals.metrics`).

Only `export` imports this module, and only where metrics go to a collector: it imports
the SDK.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import lt, sub

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tracedstore import names, otel_names
from tracedstore._version import __version__
from tracedstore.common.identity import system_of
from tracedstore.recording.snapshot import (
    ExemplarOf,
    Histogram,
    MetricSource,
    Values,
    buckets_of,
)

_SCOPE = InstrumentationScope(names.SCOPE, __version__, otel_names.SCHEMA_URL)
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

    def read(self, source: MetricSource) -> list[Metric]:
        """Return the metrics; the caller holds the lock, and calls `commit` then."""
        recorder = source.recorder
        if self._began_ns != recorder.began_ns:
            self._began_ns = self._read_ns = recorder.began_ns
            self._reported = {}
        now = max(recorder.clock.wall(), self._read_ns + 1)
        self._pending = (now, dict(self._reported))
        read = (self._metric(values, source.exemplar) for values in source.values())
        return [metric for metric in read if metric.data.data_points]

    def commit(self) -> None:
        """Note that the collector has got what was last read."""
        self._read_ns, self._reported = self._pending

    def _metric(self, values: Values, exemplar: ExemplarOf) -> Metric:
        metric = values.metric
        instrument = otel_names.INSTRUMENTS[metric]
        data: HistogramData | Sum | Gauge
        if metric.type == "histogram":
            data = HistogramData(
                self._histograms(metric, values.histograms, exemplar),
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
                    NumberDataPoint(_attributes(metric, labels), 0, now, number)
                    for labels, number in values.numbers
                ]
            )
        description = instrument.description or metric.help
        return Metric(instrument.name, description, instrument.unit, data)

    def _sums(self, values: Values) -> list[NumberDataPoint]:
        points = []
        for labels, number in values.numbers:
            key = (values.metric, labels)
            counted = self._count(key, (number,), (), self._temporality.counters)
            if counted is not None:
                start, (since_start,) = counted
                points.append(
                    NumberDataPoint(
                        _attributes(*key), start, self._pending[0], since_start
                    )
                )
        return points

    def _histograms(
        self,
        metric: names.Metric,
        histograms: Iterable[Histogram],
        exemplar: ExemplarOf,
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
                    attributes=_attributes(*key),
                    start_time_unix_nano=start,
                    time_unix_nano=self._pending[0],
                    count=int(sum(buckets)),
                    sum=nanoseconds / 1e9,
                    bucket_counts=[int(count) for count in buckets],
                    explicit_bounds=[bound / 1e9 for bound in one.bounds],
                    # Not counted; OTLP leaves them out.
                    min=None,  # type: ignore[arg-type]
                    max=None,  # type: ignore[arg-type]
                    exemplars=self._exemplars(one, exemplar),
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

    def _exemplars(self, histogram: Histogram, exemplar: ExemplarOf) -> list[Exemplar]:
        """Return the exemplars since the last collection."""
        found = (
            exemplar(histogram.series, one) for one in buckets_of(histogram.bounds)
        )
        return [
            Exemplar(
                filtered_attributes={},
                value=one.value,
                time_unix_nano=int(one.timestamp * 1e9),
                span_id=int(one.labels["span_id"], 16),
                trace_id=int(one.labels["trace_id"], 16),
            )
            for one in found
            if one is not None and one.timestamp * 1e9 >= self._read_ns
        ]


def in_scope(resource: Resource, metrics: Sequence[Metric]) -> ResourceMetrics:
    """Return metrics as those of this package, in a process."""
    scope = ScopeMetrics(_SCOPE, metrics, otel_names.SCHEMA_URL)
    return ResourceMetrics(resource, [scope], resource.schema_url)


def _attributes(metric: names.Metric, labels: tuple[str, ...]) -> Mapping[str, str]:
    attributes = {
        otel_names.ATTRIBUTES[label]: value
        for label, value in zip(metric.labels, labels, strict=True)
        if value
    }
    if otel_names.STORE in attributes:
        attributes[otel_names.SYSTEM] = system_of(attributes[otel_names.STORE])
    return attributes
