"""The values of all metrics at one time, whatever they are exported to.

`compact` has what dashboards and alerts use: an operation from its first call on, few
bounds, a blocking call in the histogram of waits only, and a zero only where an alert
needs one (docs/metrics.md). `full` has every series from the start.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import is_ordinary_answer
from tracedstore.recording.counters import (
    BOUNDS,
    BUCKETS,
    BYTES,
    FULL_OPERATION_BOUNDS,
    FULL_WAIT_BOUNDS,
    NANOSECONDS,
    NODE_OPERATION_BOUNDS,
    NODE_WAIT_BOUNDS,
    OPERATION_BOUNDS,
    SWAPS_LOST,
    SWAPS_WON,
    WAIT_BOUNDS,
    Series,
    SeriesCounts,
    SeriesTable,
)
from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import Recorder

Sums = Mapping[Series, SeriesCounts]
# Values of labels, and a value.
Number = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of one label set.

    Attributes:
        labels: The values of the metric's labels.
        bounds: The upper bounds of its buckets, in nanoseconds.
        counts: Calls in each bucket, not cumulative; the last one is beyond all bounds.
        nanoseconds: The sum of the durations.
        exemplars: A traced call of each bucket, None for one without. Empty for a
            histogram that has none.
    """

    labels: tuple[str, ...]
    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    nanoseconds: int
    exemplars: "tuple[CallExemplar | None, ...]" = ()


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one metric: numbers by label values, or histograms."""

    metric: names.Metric
    numbers: Collection[Number]
    histograms: Collection[Histogram] = ()


class CallExemplar(NamedTuple):
    """A traced call, as the example of a bucket.

    Attributes:
        trace_id: The trace, as text.
        span_id: Its span.
        seconds: Its duration.
        ended: When it ended, in seconds since the epoch.
    """

    trace_id: str
    span_id: str
    seconds: float
    ended: float


class Exemplars:
    """Observes calls, and keeps the last traced one of each bucket of `BOUNDS`."""

    name = names.METRICS_OBSERVER

    def __init__(self, series: SeriesTable) -> None:
        self._series = series
        self.reset()

    def observe(self, operation: Operation) -> None:
        """Keep the trace of a call as the exemplar of its bucket."""
        if not operation.trace_id:
            return
        series = self._series.of(
            operation.store.kind, operation.method, operation.error_type
        )
        bucket = bisect_left(BOUNDS, operation.duration_ns)
        self._found[series, bucket] = CallExemplar(
            operation.trace_id,
            operation.span_id,
            operation.seconds,
            (operation.started_ns + operation.duration_ns) / 1e9,
        )

    def reset(self) -> None:
        """Drop the parent's exemplars, as a forked child must."""
        self._found: dict[tuple[Series, int], CallExemplar] = {}

    def of(
        self, series: Series, bounds: tuple[int, ...]
    ) -> tuple[CallExemplar | None, ...]:
        """Return the exemplar of each bucket of a histogram, the slowest call's."""
        if not self._found:
            return ()
        return tuple(self._slowest(series, one) for one in _buckets_of(bounds))

    def _slowest(self, series: Series, buckets: range) -> CallExemplar | None:
        found = (self._found.get((series, bucket)) for bucket in reversed(buckets))
        return next((one for one in found if one is not None), None)


class Snapshots:
    """Takes snapshots of what a process has counted.

    Args:
        recorder: What the process counts into.
        exemplars: The examples of its calls.
        full: Every series, from zero.
        suppressed_by_caller: Returns how many spans callers suppressed.
        events_dropped: Returns how many events were dropped.

    Attributes:
        recorder: What the process counts into.
    """

    def __init__(
        self,
        recorder: Recorder,
        exemplars: Exemplars,
        *,
        full: bool,
        suppressed_by_caller: Callable[[], int] = lambda: 0,
        events_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self.recorder = recorder
        self._exemplars = exemplars
        self._full = full
        self._suppressed_by_caller = suppressed_by_caller
        self._events_dropped = events_dropped

    def take(self, *, of_node: bool = False) -> Iterator[Values]:
        """Return the values of every metric but the telemetry's failures.

        Args:
            of_node: Histograms have the bounds of a node (`names.NODE_SUMS`).
        """
        recorder = self.recorder
        sums = recorder.counters.sums()
        known = recorder.series.all()
        every = [one for one in known if self._full or any(sums[one][BUCKETS:])]
        yield from self._calls(every, sums, of_node=of_node)
        yield _errors(known, sums)
        yield from _counters(every, sums, recorder.series.probed)
        yield from self._in_flight(every)
        yield from self._cold(of_node=of_node)
        suppressed = {
            (names.OVER_BUDGET,): recorder.counters.over_budget(),
            (names.SUPPRESSED_BY_CALLER,): self._suppressed_by_caller(),
        }
        yield Values(names.SPANS_SUPPRESSED, self._counted(suppressed.items()))
        for metric, dropped in (
            (names.EVENTS_DROPPED, self._events_dropped()),
            (names.OPERATIONS_DROPPED, recorder.counters.dropped()),
        ):
            yield Values(metric, self._counted([((), dropped)]))
        core = "python" if recorder.native is None else "native"
        yield Values(names.BUILD_INFO, [((__version__, torch.__version__, core), 1)])

    def failures(self) -> Values:
        """Return the failures of the telemetry itself."""
        counts = self.recorder.failures.counts()
        observers = dict.fromkeys((*names.OBSERVERS, *counts))
        numbers = [((observer,), counts.get(observer, 0)) for observer in observers]
        return Values(names.TELEMETRY_FAILURES, self._counted(numbers))

    def _counted(self, numbers: Iterable[Number]) -> list[Number]:
        """Return the numbers to export: without zeros, but for `full`."""
        return [(labels, number) for labels, number in numbers if self._full or number]

    def _calls(
        self, every: list[Series], sums: Sums, *, of_node: bool
    ) -> Iterator[Values]:
        operations = [one for one in every if self._full or not one.method.blocks]
        waits = [one for one in every if one.method.blocks]
        operation_bounds = FULL_OPERATION_BOUNDS if self._full else OPERATION_BOUNDS
        if of_node:
            operation_bounds = NODE_OPERATION_BOUNDS
        for metric, series, bounds in (
            (names.OPERATION_DURATION, operations, operation_bounds),
            (names.WAIT_DURATION, waits, self._wait_bounds(of_node=of_node)),
        ):
            histograms = [
                Histogram(
                    (one.store, one.method.name, one.error_type),
                    bounds,
                    _coarser(sums[one][BUCKETS:], bounds),
                    sums[one][NANOSECONDS],
                    self._exemplars.of(one, bounds),
                )
                for one in series
            ]
            yield Values(metric, (), histograms)

    def _wait_bounds(self, *, of_node: bool) -> tuple[int, ...]:
        if of_node:
            return NODE_WAIT_BOUNDS
        return FULL_WAIT_BOUNDS if self._full else WAIT_BOUNDS

    def _in_flight(self, every: Iterable[Series]) -> Iterator[Values]:
        calls = self.recorder.counters.calls()
        series = [call.state.series[call.method.index] for call in calls]
        labels_of = [(each.store, each.method.name) for each in series]
        counts = Counter(labels_of)
        known = ((one.store, one.method.name) for one in every) if self._full else ()
        labels = dict.fromkeys((*known, *counts))
        yield Values(names.IN_FLIGHT, [(label, counts[label]) for label in labels])
        # Calls are sorted, oldest first: reversed, the oldest is written last and kept.
        starts = {
            label: self.recorder.clock.wall_of(call.started) / 1e9
            for label, call in zip(reversed(labels_of), reversed(calls), strict=True)
        }
        yield Values(names.OLDEST_START, starts.items())

    def _cold(self, *, of_node: bool) -> Iterator[Values]:
        for cold, numbers, histograms in self.recorder.cold.read():
            found = numbers.items()
            summed = of_node and cold.metric in names.NODE_SUMS
            bounds = self._wait_bounds(of_node=summed)
            yield Values(
                cold.metric,
                found if cold.zeros else self._counted(found),
                [
                    Histogram(
                        labels,
                        bounds,
                        _coarser(counts[BUCKETS:], bounds),
                        counts[NANOSECONDS],
                    )
                    for labels, counts in histograms.items()
                    if self._full or cold.zeros or any(counts[BUCKETS:])
                ],
            )


@cache
def _buckets_of(bounds: tuple[int, ...]) -> tuple[range, ...]:
    """Return which buckets of `BOUNDS` each bucket of a coarser histogram has."""
    ends = [*(BOUNDS.index(bound) for bound in bounds), len(BOUNDS)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return tuple(range(start, end + 1) for start, end in zip(starts, ends, strict=True))


def _coarser(counts: list[int], bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(counts[bucket] for bucket in one) for one in _buckets_of(bounds))


def _errors(known: Iterable[Series], sums: Sums) -> Values:
    errors: Counter[tuple[str, ...]] = Counter()
    for one in known:
        failed = one.error_type and not is_ordinary_answer(one.error_type)
        errors[one.store,] += sum(sums[one][BUCKETS:]) if failed else 0
    return Values(names.OPERATION_ERRORS, errors.items())


def _counters(
    every: Iterable[Series], sums: Sums, probed: Collection[str]
) -> Iterator[Values]:
    attempts: dict[tuple[str, ...], float] = {}
    retries: dict[tuple[str, ...], float] = {}
    value_bytes: dict[tuple[str, ...], float] = {}
    totals: dict[tuple[str, str], list[int]] = {}
    methods = {one.method.name: one.method for one in every}
    for one in every:
        # These have no error_type: a failed call moves bytes and loses compare-and-sets
        # as well.
        total = totals.setdefault((one.store, one.method.name), [0] * BUCKETS)
        for position in range(BUCKETS):
            total[position] += sums[one][position]
    for (store, name), total in totals.items():
        labels, method = (store, name), methods[name]
        repeats_itself = method.repeats == "call" and store in probed
        if method.swapped is not None or repeats_itself:
            attempts[*labels, names.WON] = total[SWAPS_WON]
            attempts[*labels, names.LOST] = total[SWAPS_LOST]
        if repeats_itself or method.repeats == "caller":
            retries[labels] = total[SWAPS_LOST]
        if method.size is not None:
            value_bytes[labels] = total[BYTES]
    yield Values(names.CAS_ATTEMPTS, attempts.items())
    yield Values(names.CAS_RETRIES, retries.items())
    yield Values(names.VALUE_BYTES, value_bytes.items())
