"""Rates and quantiles of Store calls, from two readings of the ranks' metrics."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from tracedstore import names
from tracedstore.tools.job_view import OperationRate, RankRate, Rates

# Readings that a sparkline shows.
_HISTORY = 60
_WAIT, _OPERATION = (f"{metric.name}_bucket{{" for metric in names.CALL_DURATIONS)
_CAS = f"{names.CAS_ATTEMPTS.name}{{"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Store methods; a page may have any others.
_MAX_OPERATIONS = 64

# Which rank of which host; processes of a rank have different pids.
Process = tuple[int, str, int]
# Calls up to a duration, by operation and duration.
Buckets = Counter[tuple[str, float]]


@dataclass(slots=True)
class Scrape:
    """The parts of one page that are used.

    Attributes:
        time: When it was read, in seconds since the epoch.
        buckets: Calls by operation and upper bound, cumulative.
        lost: Compare-and-sets lost.
    """

    time: float
    buckets: Buckets = field(default_factory=Counter)
    lost: float = 0.0


def parse(page: bytes, time: float) -> Scrape:
    """Parse a page in Prometheus's text format; other lines are skipped."""
    scrape = Scrape(time)
    # Blocking calls may be in both histograms.
    quick: Buckets = Counter()
    for line in page.decode("utf-8", "replace").splitlines():
        if not line.startswith((_WAIT, _OPERATION, _CAS)):
            continue
        labels = dict(_LABEL.findall(line))
        try:
            value = float(line.rpartition("}")[2].split()[0])
            if line.startswith(_CAS):
                scrape.lost += value if labels.get("result") == names.LOST else 0.0
            else:
                buckets = scrape.buckets if line.startswith(_WAIT) else quick
                buckets[labels["operation"], float(labels["le"])] += int(value)
        except (ValueError, KeyError, IndexError, OverflowError):
            continue
    waits = {operation for operation, _ in scrape.buckets}
    scrape.buckets.update(
        {bucket: number for bucket, number in quick.items() if bucket[0] not in waits}
    )
    return scrape


class RateMeter:
    """Compares each page of a rank with the page before."""

    def __init__(self) -> None:
        self._before: dict[Process, Scrape] = {}
        self._history: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_HISTORY)
        )
        self._lost: deque[float] = deque(maxlen=_HISTORY)

    def update(
        self, pages: Mapping[Process, bytes], time: float, serving: int
    ) -> Rates:
        """Return the rates since the readings before.

        Args:
            pages: The metrics of each rank that answered.
            time: When they were read.
            serving: The number of ranks that serve metrics.
        """
        total: Counter[tuple[str, float]] = Counter()
        per_second: Counter[str] = Counter()
        ranks = []
        compared = False
        for process, page in pages.items():
            after, before = parse(page, time), self._before.get(process)
            self._before[process] = after
            if before is None or after.time <= before.time:
                continue
            compared = True
            seconds = after.time - before.time
            added = after.buckets - before.buckets
            total += added
            calls = {
                operation: number / seconds
                for (operation, bound), number in added.items()
                if bound == inf
            }
            per_second.update(calls)
            ranks.append(
                RankRate(
                    rank=process[0],
                    host=process[1],
                    per_second=sum(calls.values()),
                    p99=quantile(_of_all(added), 0.99),
                    lost=max(0.0, after.lost - before.lost) / seconds,
                )
            )
        if compared:
            self._remember(per_second, sum(one.lost for one in ranks))
        return Rates(
            operations=tuple(self._operations(per_second, total)),
            ranks=tuple(sorted(ranks, key=lambda one: (-one.per_second, one.rank))),
            lost=sum(one.lost for one in ranks),
            lost_history=tuple(self._lost),
            serving=serving,
        )

    def _remember(self, per_second: Mapping[str, float], lost: float) -> None:
        self._lost.append(lost)
        for operation in per_second.keys() | self._history.keys():
            if operation in self._history or len(self._history) < _MAX_OPERATIONS:
                self._history[operation].append(per_second.get(operation, 0.0))

    def _operations(
        self, per_second: Mapping[str, float], total: Buckets
    ) -> Iterable[OperationRate]:
        ordered = sorted(
            self._history, key=lambda one: (-per_second.get(one, 0.0), one)
        )
        for operation in ordered:
            buckets = Counter(
                {bound: n for (name, bound), n in total.items() if name == operation}
            )
            yield OperationRate(
                operation=operation,
                per_second=per_second.get(operation, 0.0),
                p50=quantile(buckets, 0.5),
                p99=quantile(buckets, 0.99),
                history=tuple(self._history[operation]),
            )


def _of_all(buckets: Buckets) -> Counter[float]:
    """Return one histogram of all operations, whose bounds may differ.

    Calls of an operation between two of its bounds count from the upper one on.
    """
    by_operation: defaultdict[str, dict[float, int]] = defaultdict(dict)
    for (operation, bound), number in buckets.items():
        by_operation[operation][bound] = number
    summed: Counter[float] = Counter()
    for bound in {bound for _, bound in buckets}:
        for own in by_operation.values():
            below = [upper for upper in own if upper <= bound]
            summed[bound] += own[max(below)] if below else 0
    return summed


def quantile(buckets: Mapping[float, int], share: float) -> float | None:
    """Return a quantile of a cumulative histogram, as Prometheus computes it.

    None without calls. Calls above the highest bound count as that bound.
    """
    calls = buckets.get(inf, 0)
    if not calls:
        return None
    wanted = share * calls
    bounds = [(0.0, 0), *sorted(buckets.items())]
    for (lower, below), (upper, up_to) in pairwise(bounds):
        if up_to >= wanted and up_to > below:
            if upper == inf:
                return lower
            return lower + (upper - lower) * (wanted - below) / (up_to - below)
    return None
