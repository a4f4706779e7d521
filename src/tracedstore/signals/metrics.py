"""The Prometheus collector: turns a snapshot of the counters into metric families.

Calls never touch prometheus_client, which would cost more than a HashStore call. They
count into the counters, which are summed at a scrape.
"""

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from tracedstore import names
from tracedstore.recording.counters import BOUNDS, Series
from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.snapshot import Histogram, Snapshots, Values, buckets_of

_logger = logging.getLogger(names.SCOPE)


class MetricsCollector(Collector):
    """Exports snapshots, with an exemplar for each histogram bucket."""

    name = names.METRICS_OBSERVER

    def __init__(self, recorder: Recorder, snapshots: Snapshots) -> None:
        self._recorder = recorder
        self._snapshots = snapshots
        self._exemplars: dict[tuple[Series, int], Exemplar] = {}

    def observe(self, operation: Operation) -> None:
        """Keep the trace of a call as the exemplar of its bucket."""
        if not operation.trace_id:
            return
        series = self._recorder.series.of(
            operation.store.kind, operation.method, operation.error_type
        )
        bucket = bisect_left(BOUNDS, operation.duration_ns)
        self._exemplars[series, bucket] = Exemplar(
            {"trace_id": operation.trace_id, "span_id": operation.span_id},
            operation.seconds,
            (operation.started_ns + operation.duration_ns) / 1e9,
        )

    def reset(self) -> None:
        """Drop the parent's exemplars, as a forked child must."""
        self._exemplars = {}

    def register(self, registry: CollectorRegistry) -> None:
        """Register with a registry."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _logger.warning(
                "PROMETHEUS_MULTIPROC_DIR is set, but its files carry no custom"
                " collectors: serve the metrics of each process by itself"
            )
        registry.register(self)

    def describe(self) -> Iterator[Family]:
        """Return the families without samples: registering does not collect."""
        return (_EMPTY[metric.type](metric) for metric in names.METRICS)

    def collect(self) -> Iterator[Family]:
        """Return the families with samples.

        A failure must not fail the application's scrape.
        """
        failures = self._recorder.failures
        families: list[Family] = []
        if not failures.rests(self.name):
            try:
                families = [self._family(one) for one in self._snapshots.take()]
            except Exception as error:
                failures.add(self.name, error)
        families.append(self._family(self._snapshots.failures()))
        # Help texts would be a third of the page of an ordinary rank.
        return (family for family in families if family.samples)

    def _family(self, values: Values) -> Family:
        metric = values.metric
        if metric.type == "histogram":
            histogram = _histogram(metric)
            for one in values.histograms:
                histogram.add_metric(
                    one.labels, self._buckets(one), one.nanoseconds / 1e9
                )
            return histogram
        family = _counter(metric) if metric.type == "counter" else _gauge(metric)
        for labels, number in values.numbers:
            family.add_metric(labels, number)
        return family

    def _buckets(
        self, histogram: Histogram
    ) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for le, count, inner in zip(
            _upper_bounds(histogram.bounds),
            accumulate(histogram.counts),
            buckets_of(histogram.bounds),
            strict=True,
        ):
            exemplar = self.exemplar(histogram.series, inner)
            buckets.append((le, count, exemplar) if exemplar else (le, count))
        return buckets

    def exemplar(self, series: Series | None, buckets: range) -> Exemplar | None:
        """Return the exemplar of some recorded buckets of a series."""
        if series is None or not self._exemplars:
            return None
        # An exported bucket is several recorded ones: take the slowest call's.
        for bucket in reversed(buckets):
            exemplar = self._exemplars.get((series, bucket))
            if exemplar is not None:
                return exemplar
        return None


@cache
def _upper_bounds(bounds: tuple[int, ...]) -> tuple[str, ...]:
    return (*(str(bound / 1e9) for bound in bounds), "+Inf")


def _histogram(metric: names.Metric) -> HistogramMetricFamily:
    return HistogramMetricFamily(metric.family, metric.help, labels=metric.labels)


def _counter(metric: names.Metric) -> CounterMetricFamily:
    return CounterMetricFamily(metric.family, metric.help, labels=metric.labels)


def _gauge(metric: names.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.family, metric.help, labels=metric.labels)


_EMPTY: Mapping[str, Callable[[names.Metric], Family]] = {
    "histogram": _histogram,
    "counter": _counter,
    "gauge": _gauge,
}
