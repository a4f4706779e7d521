"""What the metrics in OpenTelemetry have to be, given the Prometheus exposition."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from tracedstore import names

# Labels that a scraped series has of its target.
TARGET = {"run_id", "rank", "local_rank", "host"}
# A metric, and its attributes.
Stream = tuple[str, frozenset[tuple[str, Any]]]


@dataclass
class Distribution:
    """A histogram: calls up to each bound, and all calls with their sum."""

    up_to: dict[float, float] = field(default_factory=dict)
    count: float = 0
    sum: float = 0.0

    def add(self, bounds: Iterable[float], counts: Iterable[int], total: float) -> None:
        """Add the buckets of a data point."""
        up_to = dict(zip([*bounds, float("inf")], accumulate(counts), strict=True))
        for bound, count in up_to.items():
            self.up_to[bound] = self.up_to.get(bound, 0) + count
        self.count = self.up_to[float("inf")]
        self.sum += total

    def agrees(self, other: "Distribution") -> bool:
        """Return whether another one, with fewer bounds, is of the same calls."""
        return (
            self.count == other.count
            and abs(self.sum - other.sum) < 1e-6
            and all(self.up_to[bound] == count for bound, count in other.up_to.items())
        )


def exposed(
    families: Iterable[Family],
) -> tuple[dict[Stream, float], dict[Stream, Distribution]]:
    """Return the numbers and histograms of a Prometheus exposition, by OTel's names.

    They have no labels of their target.
    """
    by_name = {metric.family: metric for metric in names.METRICS}
    numbers: dict[Stream, float] = {}
    histograms: dict[Stream, Distribution] = {}
    for family in families:
        metric = by_name.get(family.name)
        for sample in family.samples if metric else ():
            assert metric is not None
            name = metric.otel
            stream = (name, _attributes(sample))
            if metric.type != "histogram":
                if sample.name in (metric.name, metric.family):
                    numbers[stream] = sample.value
                continue
            histogram = histograms.setdefault(stream, Distribution())
            if sample.name.endswith("_bucket"):
                histogram.up_to[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_count"):
                histogram.count = sample.value
            elif sample.name.endswith("_sum"):
                histogram.sum = sample.value
    return numbers, histograms


def _attributes(sample: Sample) -> frozenset[tuple[str, Any]]:
    return frozenset(
        (label, value)
        for label, value in sample.labels.items()
        if value and label != "le"
    )


def without_target(attributes: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the attributes of a point but those that a target has as labels."""
    return frozenset(
        (name, value) for name, value in attributes.items() if name not in TARGET
    )
