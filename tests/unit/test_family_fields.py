"""Metric families on the way from a worker to its agent, valid and hostile ones."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    Info,
    Summary,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from support.hostile_json import JSON
from tracedstore.export.node_metrics import MAX_SAMPLES, from_fields, to_fields

SAMPLE: list[Any] = ["_total", {"a": "b"}, 1.0, None, [{"trace_id": "x"}, 1.0, 2.0]]
FAMILY: list[Any] = ["a", "counter", "help", "", [SAMPLE]]


class Families(Collector):
    """A collector of given families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families


def registry_of(families: list[Metric]) -> CollectorRegistry:
    """Return a registry with these families."""
    registry = CollectorRegistry()
    registry.register(Families(families))
    return registry


def test_every_type() -> None:
    """All types arrive as they were sent, in both formats and with exemplars."""
    registry = CollectorRegistry()
    Counter("a", 'A "help"\nof two lines.', ["l"], registry=registry).labels(
        'x"\\\n'
    ).inc(2, exemplar={"trace_id": "abc"})
    gauge = Gauge("b_seconds", "B.", ["l"], unit="seconds", registry=registry)
    for label, number in (("nan", math.nan), ("inf", math.inf), ("low", -math.inf)):
        gauge.labels(label).set(number)
    Histogram("c", "C.", registry=registry).observe(0.3, {"trace_id": "def"})
    Summary("d", "D.", registry=registry).observe(1)
    Info("e", "E.", registry=registry).info({"version": "1"})
    Enum("f", "F.", states=["on", "off"], registry=registry)

    sent = json.dumps(to_fields(registry.collect()), allow_nan=False)
    received = registry_of(list(from_fields(json.loads(sent))))

    assert generate_latest(received) == generate_latest(registry)
    text = exposition.generate_latest(received)
    assert text == exposition.generate_latest(registry)
    assert b'# {trace_id="abc"}' in text
    assert list(text_string_to_metric_families(text.decode()))


def test_names_that_need_quotes() -> None:
    """A family with such a name is left out."""
    other = ["http.requests", "gauge", "", "", []]

    (family,) = from_fields([other, FAMILY])

    assert family.name == "a"


@pytest.mark.parametrize(
    "family",
    [
        None,
        {},
        "abcde",
        [],
        ["a", "counter", "help", ""],
        ["a", "counter", "help", "", None],
        [1, "counter", "help", "", []],
        ["a", "meter", "help", "", []],
        ["a", ["counter"], "help", "", []],
        ["a", "counter", None, "", []],
        ["a", "counter", "\ud800", "", []],
        ["a", "counter", "x" * 5000, "", []],
        ["a", "counter", "help", "seconds", []],
        ["a", "counter", "help", "", [[]] * (MAX_SAMPLES + 1)],
    ],
)
def test_hostile_families(family: Any) -> None:
    """Anything that is no family raises ValueError."""
    with pytest.raises(ValueError, match=r"."):
        list(from_fields([family]))


# Values that the fields of a sample cannot have, by their position.
BAD_FIELDS: dict[int, list[Any]] = {
    0: ["", "_bucket", "_total\nb 1", None, 3, ["_total"]],
    1: [None, [], {"a": 1}, {"a b": "c"}, {"": "c"}, {"a": "\ud800"}],
    2: ["1", None, True, 1, [1.0], "infinity"],
    3: ["now", -1, 1e300, True],
    4: ["x", [], [{}, 1], [{}, "1", None], [{}, 1.0, "x"]],
}
BAD_FIELDS[1] += [{f"l{n}": "" for n in range(65)}]
BAD_FIELDS[4] += [[{"a": "x" * 129}, 1.0, None], [{'a"}': "x"}, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("position", "value"),
    [(position, value) for position, bad in BAD_FIELDS.items() for value in bad],
)
def test_hostile_samples(position: int, value: Any) -> None:
    """A sample with one field that is not valid raises ValueError."""
    sample = [*SAMPLE[:position], value, *SAMPLE[position + 1 :]]

    with pytest.raises(ValueError, match=r"."):
        list(from_fields([["a", "counter", "help", "", [sample]]]))


@pytest.mark.parametrize("labels", [{}, {"le": "x"}, {"le": "nan"}])
def test_buckets_without_bound(labels: dict[str, str]) -> None:
    """A bucket has a number as its upper bound."""
    with pytest.raises(ValueError, match=r"."):
        list(
            from_fields(
                [["a", "histogram", "", "", [["_bucket", labels, 1.0, None, None]]]]
            )
        )


@given(
    JSON
    | JSON.map(lambda value: [["a", "gauge", "", "", [["", value, 1.0, None, None]]]])
)
def test_arbitrary_json(fields: Any) -> None:
    """What is accepted can be served."""
    try:
        families = list(from_fields(fields))
    except ValueError:
        return
    generate_latest(registry_of(families))
    text = exposition.generate_latest(registry_of(families)).decode()
    list(text_string_to_metric_families(text))
