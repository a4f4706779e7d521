"""The metrics of what is rare next to Store calls: one table of counts and gauges.

Barriers, rendezvous, requests to etcd and stalls are counted here, whatever they are.
Each metric is declared once, in `TABLE`; `recording.snapshot` exports all of them in
the same way. The counters of Store calls (`recording.counters`) are apart, because a
call must cost nothing but an addition.

Recording takes no lock: a signal handler may interrupt it and record something itself.
What was recorded is counted when the metrics are read, or when much of it waits.
"""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, get_args

from tracedstore import names
from tracedstore.common.keys import KeyFamilies, key_text
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.recording.counters import (
    BOUNDS,
    BUCKETS,
    NANOSECONDS,
    SeriesCounts,
    bounded,
    new_counts,
)

# What was recorded and is not counted yet, at most.
_MAX_UNCOUNTED = 256
_MAX_BACKENDS = 16

# Values of labels.
Result = Literal["completed", "timeout", "failed"]
Write = Literal["accepted", "conflict", "failed"]
RequestResult = Literal["ok", "failed", "unknown"]
ExportResult = Literal["ok", "failed"]
Recovery = Literal["retry", "failover", "watch_restart", "log_in"]

Labels = tuple[str, ...]
# A metric, the values of its labels, and a number: what a counter grows by, a duration
# in nanoseconds for a histogram, the value of a gauge. None: the gauge has no value any
# more; a counter or a histogram exists from zero.
Change = tuple[names.Metric, Labels, float | None]


@dataclass(frozen=True, slots=True)
class ColdMetric:
    """A metric of the table.

    Attributes:
        metric: Its name, labels and type. A histogram has the bounds of waits.
        last: All values of its last label. A label set that exists has those with the
            other values beside it, from zero.
        zeros: `compact` exports zeros as well, because an alert needs them, or because
            zero is a value of a gauge.
    """

    metric: names.Metric
    last: tuple[str, ...] = ()
    zeros: bool = True


TABLE: Final = (
    ColdMetric(names.BARRIER_DURATION, get_args(Result), zeros=False),
    ColdMetric(names.BARRIER_LAST_ARRIVALS),
    ColdMetric(names.BARRIER_ARRIVED),
    ColdMetric(names.BARRIER_MISSING),
    ColdMetric(names.BARRIER_RANK_MISSING),
    ColdMetric(names.RENDEZVOUS_DURATION, get_args(Result), zeros=False),
    ColdMetric(names.RENDEZVOUS_WRITES, get_args(Write)),
    ColdMetric(names.RENDEZVOUS_STATE_BYTES),
    ColdMetric(names.RENDEZVOUS_PARTICIPANTS),
    ColdMetric(names.RENDEZVOUS_WAIT_LIST),
    ColdMetric(names.RENDEZVOUS_ROUND),
    ColdMetric(names.RENDEZVOUS_COMPLETE),
    ColdMetric(names.RENDEZVOUS_OLDEST_HEARTBEAT),
    ColdMetric(names.JOB_AWAITED),
    ColdMetric(names.JOB_RANK_AWAITED),
    ColdMetric(names.JOB_ABORTS),
    ColdMetric(names.JOB_STALLED_START),
    ColdMetric(names.COLLECTIVE_SEQUENCE),
    ColdMetric(names.LAST_PROGRESS),
    ColdMetric(names.ETCD_REQUESTS_MADE, get_args(RequestResult), zeros=False),
    ColdMetric(names.ETCD_RECOVERIES_MADE, get_args(Recovery), zeros=False),
    ColdMetric(names.ETCD_BYTES),
    ColdMetric(names.EXPORTS, get_args(ExportResult)),
    ColdMetric(names.EXPORT_DROPPED),
)
_LAST: Final = {one.metric.name: one.last for one in TABLE}


class ColdValues(NamedTuple):
    """The values of a metric: numbers, or the counts of histograms, by label values."""

    cold: ColdMetric
    numbers: Mapping[Labels, float]
    histograms: Mapping[Labels, SeriesCounts]


class LastingState(Protocol):
    """Something that lasts, and has gauges while it does: a stalled barrier.

    Attributes:
        group: Of the states of one group, the one that began last is exported.
    """

    @property
    def group(self) -> tuple[str, ...]:
        """See above."""

    def gauges(self) -> Iterable[tuple[names.Metric, Labels, float]]:
        """Return the values of the gauges."""


S = TypeVar("S", bound=LastingState)


def _lasts() -> bool:
    return True


class ColdMetrics:
    """The counts, gauges and histograms of `TABLE`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        # Reentrant: a `__del__` that garbage collection runs may use a traced store.
        self._lock = threading.RLock()
        self._uncounted: deque[Change] = deque()
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in _LAST}
        self._histograms: dict[str, dict[Labels, SeriesCounts]] = {
            name: {} for name in _LAST
        }
        # By what they are states of; each with a function that tells whether it lasts.
        self._states: dict[object, tuple[LastingState, Callable[[], bool]]] = {}
        # The keys of Store calls have other families, so that a program with many of
        # them leaves room for its barriers.
        self._barriers = KeyFamilies()
        self._backends: set[str] = set()

    def record(self, *changes: Change) -> None:
        """Count, observe and set. Takes no lock and no time; see `Change`."""
        self._uncounted.extend(changes)  # atomic
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            off_main_thread(self._count)

    def label_value(self, label: str, value: str) -> str:
        """Return a label's value for what a user has named: bounded in number."""
        if label == "barrier":
            return self._barriers.of(key_text(value))
        # Users write rendezvous backends of their own.
        if label == "backend":
            return bounded(value, self._backends, _MAX_BACKENDS)
        return value

    def begin(
        self, owner: object, state: LastingState, lasts: Callable[[], bool] = _lasts
    ) -> bool:
        """Export the gauges of a state, or replace it; return whether it lasts.

        A thread that found the state may be late: what it is the state of has ended
        meanwhile, and its gauges must not stay set.

        Args:
            owner: What it is the state of, hashable.
            state: The state.
            lasts: Returns False once it has ended, if `end` is not called.
        """
        with self._lock:
            self._forget_ended()
            if lasts():
                self._states[owner] = state, lasts
            return lasts()

    def end(self, owner: object) -> bool:
        """Forget a state; return whether there was one."""
        with self._lock:
            return self._states.pop(owner, None) is not None

    def states(self, kind: type[S]) -> list[S]:
        """Return the states of a kind that last, in the order in which they began."""
        return [state for state in self._lasting() if isinstance(state, kind)]

    def read(self) -> list[ColdValues]:
        """Return the values of each metric of the table."""
        gauges: dict[str, dict[Labels, float]] = {one.metric.name: {} for one in TABLE}
        for state in {state.group: state for state in self._lasting()}.values():
            for metric, labels, value in state.gauges():
                gauges[metric.name][labels] = value
        with self._lock:
            self._count()
            return [
                ColdValues(
                    one,
                    self._numbers[one.metric.name] | gauges[one.metric.name],
                    {
                        labels: list(counts)
                        for labels, counts in self._histograms[one.metric.name].items()
                    },
                )
                for one in TABLE
            ]

    def _lasting(self) -> list[LastingState]:
        with self._lock:
            self._forget_ended()
            return [state for state, _ in self._states.values()]

    def _forget_ended(self) -> None:
        for owner, (_, lasts) in list(self._states.items()):
            if not lasts():
                self._states.pop(owner, None)

    def _count(self) -> None:
        with self._lock:
            while self._uncounted:
                try:
                    change = self._uncounted.popleft()
                except IndexError:
                    return  # a `__del__` that ran in this thread was quicker
                self._apply(*change)

    def _apply(self, metric: names.Metric, given: Labels, number: float | None) -> None:
        labels = tuple(map(self.label_value, metric.labels, given))
        if metric.type == "gauge":
            if number is None:
                self._numbers[metric.name].pop(labels, None)
            else:
                self._numbers[metric.name][labels] = number
            return
        last = _LAST[metric.name]
        beside = [(*labels[:-1], value) for value in last] if last else [labels]
        if metric.type == "counter":
            numbers = self._numbers[metric.name]
            for one in beside:
                numbers.setdefault(one, 0)
            numbers[labels] += number or 0
            return
        histograms = self._histograms[metric.name]
        for one in beside:
            if one not in histograms:
                histograms[one] = new_counts()
        if number is not None:
            histograms[labels][BUCKETS + bisect_left(BOUNDS, number)] += 1
            histograms[labels][NANOSECONDS] += int(number)
