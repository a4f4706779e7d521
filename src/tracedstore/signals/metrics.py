"""The Prometheus collector: turns the counters into metric families at a scrape.

Calls never touch prometheus_client, which would cost more than a HashStore call. They
count into the counters, which are summed at a scrape.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.core.barrier_stats import BarrierStats, Durations, Result
from tracedstore.core.counters import (
    BOUNDS,
    BUCKETS,
    BYTES,
    NANOSECONDS,
    OPERATION_BOUNDS,
    RETRIES,
    SWAPS_LOST,
    SWAPS_WON,
    WAIT_BOUNDS,
    Series,
    SeriesCounts,
)
from tracedstore.core.operation import Operation
from tracedstore.core.recorder import Recorder
from tracedstore.core.rendezvous_stats import RendezvousStats
from tracedstore.core.stall_stats import StallStats

# Calls whose inner compare-and-sets are counted. Otherwise only calls that are
# compare-and-sets have the metric.
_REPEATS_SWAPS = frozenset({("etcd_store", "add")})
# A caller that loses one of these repeats it.
_REPEATED_BY_CALLER = frozenset({"set_state"})

_MAX_RANKS_NAMED = 64

Sums = Mapping[Series, SeriesCounts]


class MetricsCollector(Collector):
    """Exports the counters, with an exemplar for each histogram bucket."""

    name = names.METRICS_OBSERVER

    def __init__(
        self,
        recorder: Recorder,
        suppressed_by_caller: Callable[[], int] = lambda: 0,
        events_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._recorder = recorder
        self._suppressed_by_caller = suppressed_by_caller
        self._events_dropped = events_dropped
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

    def describe(self) -> Iterator[Family]:
        """Return the families without samples: registering does not collect."""
        return (_EMPTY[metric.type](metric) for metric in names.METRICS)

    def collect(self) -> Iterator[Family]:
        """Return all families; a failure must not fail the application's scrape."""
        failures = self._recorder.failures
        if not failures.has(self.name):
            try:
                yield from list(self._collect())
            except Exception as error:
                failures.add(self.name, error)
        counts = failures.counts()
        family = _counter(names.TELEMETRY_FAILURES)
        for observer in dict.fromkeys((*names.OBSERVERS, *counts)):
            family.add_metric([observer], counts.get(observer, 0))
        yield family

    def _collect(self) -> Iterator[Family]:
        sums = self._recorder.counters.sums()
        every = self._recorder.series.all()
        yield self._histogram(names.OPERATION_DURATION, OPERATION_BOUNDS, every, sums)
        blocking = [series for series in every if series.method.blocks]
        yield self._histogram(names.WAIT_DURATION, WAIT_BOUNDS, blocking, sums)
        yield from _counters(every, sums)
        yield from self._in_flight(every)
        yield from _barriers(self._recorder.barriers)
        yield from _rendezvous(self._recorder.rendezvous)
        yield from _stalls(self._recorder.stalls)
        suppressed = _counter(names.SPANS_SUPPRESSED)
        over_budget = self._recorder.counters.over_budget()
        suppressed.add_metric([names.OVER_BUDGET], over_budget)
        suppressed.add_metric(
            [names.SUPPRESSED_BY_CALLER], self._suppressed_by_caller()
        )
        yield suppressed
        dropped = _counter(names.EVENTS_DROPPED)
        dropped.add_metric([], self._events_dropped())
        yield dropped
        build = _gauge(names.BUILD_INFO)
        core = "python" if self._recorder.native is None else "native"
        build.add_metric([__version__, torch.__version__, core], 1)
        yield build

    def _histogram(
        self,
        metric: names.Metric,
        bounds: tuple[int, ...],
        every: Iterable[Series],
        sums: Sums,
    ) -> Family:
        family = _histogram(metric)
        for series in every:
            counts = sums[series]
            cumulative = list(accumulate(counts[BUCKETS:]))
            ends = [*(BOUNDS.index(bound) for bound in bounds), len(BOUNDS)]
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            start = 0
            for end in ends:
                le = str(BOUNDS[end] / 1e9) if end < len(BOUNDS) else "+Inf"
                exemplar = self._exemplar(series, range(start, end + 1))
                count = cumulative[end]
                buckets.append((le, count, exemplar) if exemplar else (le, count))
                start = end + 1
            labels = [series.store, series.method.name, series.error_type]
            family.add_metric(labels, buckets, counts[NANOSECONDS] / 1e9)
        return family

    def _exemplar(self, series: Series, buckets: range) -> Exemplar | None:
        # An exported bucket is several recorded ones: take the slowest call's.
        for bucket in reversed(buckets):
            exemplar = self._exemplars.get((series, bucket))
            if exemplar is not None:
                return exemplar
        return None

    def _in_flight(self, every: Iterable[Series]) -> Iterator[Family]:
        calls = self._recorder.counters.calls()
        series = [call.state.series[call.method.index] for call in calls]
        labels_of = [(each.store, each.method.name) for each in series]
        counts = Counter(labels_of)
        in_flight = _gauge(names.IN_FLIGHT)
        for labels in dict.fromkeys((s.store, s.method.name) for s in every):
            in_flight.add_metric(labels, counts[labels])
        yield in_flight
        oldest = _gauge(names.OLDEST_START)
        # Calls are sorted, oldest first: reversed, the oldest is written last and kept.
        starts = {
            labels: call.started
            for labels, call in zip(reversed(labels_of), reversed(calls), strict=True)
        }
        for labels, started in starts.items():
            oldest.add_metric(labels, self._recorder.clock.wall_of(started) / 1e9)
        yield oldest


def _barriers(stats: BarrierStats) -> Iterator[Family]:
    yield _durations(names.BARRIER_DURATION, stats.durations())
    last = _counter(names.BARRIER_LAST_ARRIVALS)
    for family, times in stats.last_arrivals().items():
        last.add_metric([family], times)
    yield last
    arrived = _gauge(names.BARRIER_ARRIVED)
    missing = _gauge(names.BARRIER_MISSING)
    rank_missing = _gauge(names.BARRIER_RANK_MISSING)
    # One of a family: stalled barriers of one family share their labels.
    for stalled in {found.family: found for found in stats.stalled()}.values():
        arrived.add_metric([stalled.family], stalled.arrived)
        missing.add_metric([stalled.family], len(stalled.missing) + stalled.possible)
        for rank, host in list(stalled.missing.items())[:_MAX_RANKS_NAMED]:
            rank_missing.add_metric([stalled.family, str(rank), host], 1)
    yield from (arrived, missing, rank_missing)


def _stalls(stats: StallStats) -> Iterator[Family]:
    count = _gauge(names.JOB_AWAITED)
    rank_awaited = _gauge(names.JOB_RANK_AWAITED)
    stalled = stats.current()
    if stalled is not None:
        count.add_metric([stalled.cause], stalled.awaited_count)
        for rank, (host, cause) in list(stalled.awaited.items())[:_MAX_RANKS_NAMED]:
            rank_awaited.add_metric([str(rank), host, cause], 1)
    yield from (count, rank_awaited)


def _rendezvous(stats: RendezvousStats) -> Iterator[Family]:
    yield _durations(names.RENDEZVOUS_DURATION, stats.durations())
    writes = _counter(names.RENDEZVOUS_WRITES)
    for labels, count in stats.writes().items():
        writes.add_metric(labels, count)
    yield writes
    size = _gauge(names.RENDEZVOUS_STATE_BYTES)
    participants = _gauge(names.RENDEZVOUS_PARTICIPANTS)
    wait_list = _gauge(names.RENDEZVOUS_WAIT_LIST)
    which = _gauge(names.RENDEZVOUS_ROUND)
    complete = _gauge(names.RENDEZVOUS_COMPLETE)
    oldest = _gauge(names.RENDEZVOUS_OLDEST_HEARTBEAT)
    for backend, view in stats.views().items():
        size.add_metric([backend], view.size)
        participants.add_metric([backend], view.participants)
        wait_list.add_metric([backend], view.wait_list)
        which.add_metric([backend], view.round)
        complete.add_metric([backend], int(view.complete))
        if view.oldest_heartbeat is not None:
            oldest.add_metric([backend], view.oldest_heartbeat)
    yield from (size, participants, wait_list, which, complete, oldest)


def _durations(
    metric: names.Metric, found: Mapping[tuple[str, Result], Durations]
) -> Family:
    family = _histogram(metric)
    bounds = [*(str(bound / 1e9) for bound in WAIT_BOUNDS), "+Inf"]
    for labels, durations in found.items():
        buckets = list(zip(bounds, accumulate(durations.buckets), strict=True))
        family.add_metric(labels, buckets, durations.nanoseconds / 1e9)
    return family


def _counters(every: Iterable[Series], sums: Sums) -> Iterator[Family]:
    attempts = _counter(names.CAS_ATTEMPTS)
    retries = _counter(names.CAS_RETRIES)
    value_bytes = _counter(names.VALUE_BYTES)
    totals: dict[tuple[str, str], list[int]] = {}
    for series in every:
        # These have no error_type: a failed call moves bytes and loses compare-and-sets
        # as well.
        labels = (series.store, series.method.name)
        total = totals.setdefault(labels, [0] * BUCKETS)
        for position in range(BUCKETS):
            total[position] += sums[series][position]
    methods = {series.method.name: series.method for series in every}
    for labels, total in totals.items():
        method = methods[labels[1]]
        repeats = labels in _REPEATS_SWAPS
        if method.swapped is not None or repeats:
            attempts.add_metric((*labels, names.WON), total[SWAPS_WON])
            attempts.add_metric((*labels, names.LOST), total[SWAPS_LOST])
        if repeats:
            retries.add_metric(labels, total[RETRIES])
        elif method.name in _REPEATED_BY_CALLER:
            retries.add_metric(labels, total[SWAPS_LOST])
        if method.size is not None:
            value_bytes.add_metric(labels, total[BYTES])
    yield from (attempts, retries, value_bytes)


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
