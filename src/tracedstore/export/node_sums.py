"""What the agent of a node sums over its processes: histograms with fine buckets.

A rank has few buckets, because each is a series of every rank of the job, and quantiles
of few buckets are wrong. A node has as many series with fine buckets, which are those
of all its ranks together. So a quantile over a job is within 25 % of the true one.

What a process had counted stays in the sum when the process ends, or does not answer:
Prometheus takes a sum that drops for a counter that was reset, and adds all of it once
more.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar, Sample

from tracedstore import names
from tracedstore.local.host_ranks import Worker
from tracedstore.recording.counters import (
    NODE_OPERATION_BOUNDS,
    NODE_WAIT_BOUNDS,
    OPERATION_BOUNDS,
    WAIT_BOUNDS,
)

_SUMMED: Final = {metric.family: metric for metric in names.NODE_SUMS}
# Label sets of all processes; those of a process are bounded where they are counted.
_MAX_LABEL_SETS: Final = 2048

_Labels = tuple[tuple[str, str], ...]
# The family, and the labels of a sample without `le`.
_Key = tuple[str, _Labels]


@dataclass(slots=True)
class _Sum:
    """The counts of one label set.

    Attributes:
        total: The value of a counter, or the sum of a histogram.
        calls: The calls up to each bound and beyond the one below it.
        exemplars: The last one of each bound.
    """

    total: float = 0.0
    calls: Counter[float] = field(default_factory=Counter)
    exemplars: dict[float, Exemplar] = field(default_factory=dict)

    def add(self, other: "_Sum") -> None:
        self.total += other.total
        self.calls.update(other.calls)
        for bound, found in other.exemplars.items():
            known = self.exemplars.get(bound)
            if known is None or _time(known) < _time(found):
                self.exemplars[bound] = found


_Sums = dict[_Key, _Sum]


class NodeSums:
    """The sums of a node, which never drop."""

    def __init__(self) -> None:
        self._ended: _Sums = {}
        # None is the agent itself.
        self._running: dict[Worker | None, _Sums] = {}

    def take(self, worker: Worker | None, families: Iterable[Family]) -> list[Family]:
        """Take what is summed out of the families of a process; return the others."""
        sums: _Sums = {}
        self._running[worker] = sums
        others = []
        for one in families:
            metric = _SUMMED.get(one.name)
            if metric is None or metric.type != one.type:
                others.append(one)
            else:
                _read(sums, one)
        return others

    def end_others(self, workers: Iterable[Worker]) -> None:
        """Keep what processes counted that are not among these any more."""
        for worker in self._running.keys() - {None, *workers}:
            _add(self._ended, self._running.pop(worker))

    def families(self) -> Iterator[Family]:
        """Return the sums.

        What only the agent counted has the bounds of a rank: the buckets are fine where
        they are of several processes.
        """
        of_ranks: _Sums = {}
        for worker, sums in self._running.items():
            if worker is not None:
                _add(of_ranks, sums)
        _add(of_ranks, self._ended)
        summed: _Sums = {}
        for sums in (of_ranks, self._running.get(None, {})):
            _add(summed, sums)
        for name, metric in _SUMMED.items():
            family = Family(name, metric.help, metric.type)
            for (family_name, labels), one in summed.items():
                if family_name == name:
                    fine = (name, labels) in of_ranks
                    family.samples += _samples(metric, dict(labels), one, fine=fine)
            if family.samples:
                yield family


def _read(sums: _Sums, family: Family) -> None:
    """Add the samples of a family; buckets without calls may be left out."""
    below: dict[_Key, float] = {}
    for sample in sorted(family.samples, key=_bound):
        if not math.isfinite(sample.value):
            continue
        rest = ((key, sample.labels[key]) for key in sample.labels if key != "le")
        key = (family.name, tuple(sorted(rest)))
        one = sums.setdefault(key, _Sum())
        if sample.name.endswith("_bucket"):
            bound = _bound(sample)
            one.calls[bound] += max(0, int(sample.value - below.get(key, 0)))
            below[key] = sample.value
            if sample.exemplar is not None:
                one.exemplars[bound] = sample.exemplar
        elif sample.name.endswith(("_sum", "_total")):
            one.total += sample.value


def _time(exemplar: Exemplar) -> float:
    return float(exemplar.timestamp or 0)


def _bound(sample: Sample) -> float:
    return float(sample.labels.get("le", "inf"))


def _add(sums: _Sums, more: Mapping[_Key, _Sum]) -> None:
    for key, one in more.items():
        if key in sums or len(sums) < _MAX_LABEL_SETS:
            sums.setdefault(key, _Sum()).add(one)


def _samples(
    metric: names.Metric, labels: dict[str, str], one: _Sum, *, fine: bool
) -> Iterator[Sample]:
    if metric.type == "counter":
        yield Sample(metric.name, labels, one.total)
        return
    bounds = [bound / 1e9 for bound in _bounds_of(metric, fine=fine)]
    calls = [0] * (len(bounds) + 1)
    exemplars: dict[int, Exemplar] = {}
    for bound, number in sorted(one.calls.items()):
        position = bisect_left(bounds, bound)
        calls[position] += number
        if bound in one.exemplars:
            exemplars[position] = one.exemplars[bound]
    up_to = list(accumulate(calls))
    texts = [*map(str, bounds), "+Inf"]
    for position, (text, number) in enumerate(zip(texts, up_to, strict=True)):
        yield Sample(
            f"{metric.name}_bucket",
            {**labels, "le": text},
            number,
            None,
            exemplars.get(position),
        )
    yield Sample(f"{metric.name}_count", labels, up_to[-1])
    yield Sample(f"{metric.name}_sum", labels, one.total)


def _bounds_of(metric: names.Metric, *, fine: bool) -> tuple[int, ...]:
    if metric is names.OPERATION_DURATION:
        return NODE_OPERATION_BOUNDS if fine else OPERATION_BOUNDS
    return NODE_WAIT_BOUNDS if fine else WAIT_BOUNDS
