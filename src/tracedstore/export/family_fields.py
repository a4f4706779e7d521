"""Metric families as JSON values, for the way from a worker to its agent.

The agent serves them in any format that a scraper asks for, with their exemplars. What
it receives is validated: one sample that is not valid would make the whole page of the
node so.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.metrics_core import METRIC_TYPES
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar, Sample

from tracedstore.common import validation

# Of one process. The largest page that was measured has 7,045.
MAX_SAMPLES: Final = 50_000
_MAX_TEXT: Final = 4096
_MAX_LABELS: Final = 64
# OpenMetrics allows that many characters in the labels of an exemplar.
_MAX_EXEMPLAR: Final = 128
# Names that need no quotes: other ones are left out.
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,511}")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}")
# What OpenMetrics lets samples of a type be called, after the name of the family.
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "counter": ("_total", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
    "info": ("_info",),
}
_NUMBERED: Final = {"_bucket": "le", "": "quantile"}


def to_fields(families: Iterable[Family]) -> list[Any]:
    """Return families as JSON values."""
    return [
        [
            family.name,
            family.type,
            family.documentation,
            family.unit,
            [_sample_fields(family, sample) for sample in family.samples],
        ]
        for family in families
    ]


def from_fields(fields: Any) -> Iterator[Family]:
    """Return families with valid names; ValueError for anything that is not valid."""
    if type(fields) is not list:
        raise ValueError("not a list of families")
    left = MAX_SAMPLES
    for one in fields:
        try:
            name, kind, documentation, unit, samples = one
            left -= len(samples)
        except TypeError:
            raise ValueError("not a family") from None
        if left < 0:
            raise ValueError(f"more than {MAX_SAMPLES} samples")
        if type(name) is not str or kind not in METRIC_TYPES:
            raise ValueError("not a family")
        if not _NAME.fullmatch(name):
            continue
        suffix = _text(unit)
        if suffix and not name.endswith(f"_{suffix}"):
            raise ValueError("not the unit of a family")
        family = Family(name, _text(documentation), kind, suffix)
        family.samples = [_sample(family, sample) for sample in samples]
        yield family


def _sample_fields(family: Family, sample: Sample) -> list[Any]:
    found = sample.exemplar
    exemplar = None
    if found is not None:
        exemplar = [found.labels, _number_field(found.value), _time(found.timestamp)]
    return [
        sample.name.removeprefix(family.name),
        sample.labels,
        _number_field(sample.value),
        _time(sample.timestamp),
        exemplar,
    ]


def _time(timestamp: Any) -> float | None:
    return None if timestamp is None else float(timestamp)


def _number_field(value: float) -> float | str:
    """Return a number as JSON has it; JSON has no NaN and no infinity."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _sample(family: Family, fields: Any) -> Sample:
    try:
        suffix, labels, value, timestamp, exemplar = fields
    except TypeError:
        raise ValueError("not a sample") from None
    if suffix not in _SUFFIXES.get(family.type, ("",)):
        raise ValueError(f"not a sample of a {family.type}")
    checked = _labels(labels)
    number = _NUMBERED.get(suffix) if family.type in _SUFFIXES else None
    if number is not None and math.isnan(float(checked.get(number, "nan"))):
        raise ValueError(f"a sample without {number}")
    with_exemplar = exemplar is not None and suffix in ("_bucket", "_total")
    return Sample(
        family.name + suffix,
        checked,
        _number(value),
        None if timestamp is None else validation.seconds(timestamp),
        _exemplar(exemplar) if with_exemplar else None,
    )


def _exemplar(fields: Any) -> Exemplar:
    try:
        labels, value, timestamp = fields
    except TypeError:
        raise ValueError("not an exemplar") from None
    checked = _labels(labels)
    if sum(map(len, (*checked, *checked.values()))) > _MAX_EXEMPLAR:
        raise ValueError("an exemplar that is too long")
    time = None if timestamp is None else validation.seconds(timestamp)
    return Exemplar(checked, _number(value), time)


def _labels(fields: Any) -> dict[str, str]:
    if type(fields) is not dict or len(fields) > _MAX_LABELS:
        raise ValueError("not labels")
    for name, value in fields.items():
        if not _LABEL.fullmatch(name):
            raise ValueError("not the name of a label")
        _text(value)
    return fields


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise ValueError(f"not a text of at most {_MAX_TEXT} characters")
    value.encode()  # raises ValueError for half of a surrogate pair
    return value


def _number(value: Any) -> float:
    if type(value) is float or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError("not a number")
