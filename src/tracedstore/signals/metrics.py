"""The Prometheus collector: turns a snapshot of the counters into metric families.

Calls never touch prometheus_client, which would cost more than a HashStore call. They
count into the counters, which are summed at a scrape.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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
from tracedstore.recording.snapshot import Histogram, Snapshots, Values

_logger = logging.getLogger(names.SCOPE)

_of_node: ContextVar[bool] = ContextVar("of_node", default=False)


@contextmanager
def for_node() -> Iterator[None]:
    """Collect meanwhile what an agent sums over its node: fine buckets.

    Buckets without calls are left out: the agent knows the bounds.
    """
    token = _of_node.set(True)
    try:
        yield
    finally:
        _of_node.reset(token)


class MetricsCollector(Collector):
    """Exports snapshots, with an exemplar for each histogram bucket."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

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
        failures = self._snapshots.recorder.failures
        families: list[Family] = []
        if not failures.rests(names.METRICS_OBSERVER):
            try:
                values = self._snapshots.take(of_node=_of_node.get())
                families = [_family(one) for one in values]
            except Exception as error:
                failures.add(names.METRICS_OBSERVER, error)
        families.append(_family(self._snapshots.failures()))
        # Help texts would be a third of the page of an ordinary rank.
        return (family for family in families if family.samples)


def _family(values: Values) -> Family:
    metric = values.metric
    if metric.type == "histogram":
        histogram = _histogram(metric)
        for one in values.histograms:
            histogram.add_metric(one.labels, _buckets(one), one.nanoseconds / 1e9)
        return histogram
    family = _counter(metric) if metric.type == "counter" else _gauge(metric)
    for labels, number in values.numbers:
        family.add_metric(labels, number)
    return family


def _buckets(
    histogram: Histogram,
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    bounds = _upper_bounds(histogram.bounds)
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    for position, found in enumerate(histogram.exemplars):
        if found is not None:
            le, count, *_ = buckets[position]
            ids = {"trace_id": found.trace_id, "span_id": found.span_id}
            exemplar = Exemplar(ids, found.seconds, found.ended)
            buckets[position] = (le, count, exemplar)
    if _of_node.get():
        *bounded, beyond = buckets
        called = zip(bounded, histogram.counts, strict=False)
        return [*(bucket for bucket, calls in called if calls), beyond]
    return buckets


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
