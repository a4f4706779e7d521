"""The metrics of a node: torchrun's agent, and its workers with their ranks.

With ``http_scope=node``, an agent that has an endpoint passes its address to the
workers that it starts, in a variable. These do not listen then: the agent asks them
over their Unix sockets, all at once. What does not answer is a sample of its own, and
never a failed scrape.

On its page, histograms of calls and barriers are those of the node, with fine buckets
(`export.node_sums`). Another page has the histograms of each rank.

The families travel as JSON values, so that the agent can serve them in any format that
a scraper asks for, with their exemplars. What it receives is validated: one sample that
is not valid would make the whole page of the node so.
"""

import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.metrics_core import METRIC_TYPES, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar, Sample

from tracedstore import names
from tracedstore.common import validation
from tracedstore.common.identity import number
from tracedstore.export.node_sums import NodeSums
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker, ask_workers
from tracedstore.local.sockets import (
    LOCAL_SOCKET,
    METRICS_PAGE,
    NODE_METRICS_PAGE,
    LocalReply,
)
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.metrics import for_node

# Seconds for all workers to answer. Prometheus waits for 10 s by default.
_TIMEOUT: Final = 2.0
# The fine buckets of a node are fewer series than the coarse ones of so many ranks; in
# a job of so many they are few in any case. All nodes of a job decide alike.
_SUMMED_WORKERS: Final = 8
_SUMMED_WORLD: Final = 256
# The pid of the agent, and the URL of its metrics.
_VARIABLE: Final = "TRACEDSTORE_NODE_ENDPOINT"

# The URL of the metrics that this process serves for workers too, if it has any.
_offered: str | None = None

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


@dataclass(frozen=True, slots=True)
class NodeEndpoint:
    """The endpoint of an agent.

    Attributes:
        url: The URL of its metrics.
        pid: The pid of the agent.
    """

    url: str
    pid: int


def offer(url: str | None) -> None:
    """Serve the workers that this process starts from now on; None for no more."""
    global _offered  # noqa: PLW0603 - a process has one endpoint
    _offered = url


@contextmanager
def announced() -> Iterator[None]:
    """Tell processes that are started meanwhile that this one serves their metrics.

    They serve their own if this process has no endpoint, or no socket to ask over.
    """
    if _offered is not None:
        RECORDER.failures.guarded(names.ENDPOINT, LOCAL_SOCKET.start)
    before = os.environ.pop(_VARIABLE, None)
    if _offered is not None and LOCAL_SOCKET.listening:
        os.environ[_VARIABLE] = f"{os.getpid()} {_offered}"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before


def of_agent() -> NodeEndpoint | None:
    """Return the endpoint at which the agent serves this process.

    None if no agent does, and if this process is not its worker: what a worker starts
    inherits the variable, and the agent does not know it.
    """
    pid, _, url = os.environ.get(_VARIABLE, "").partition(" ")
    try:
        found = NodeEndpoint(
            validation.http_url(url),
            validation.digits(pid.encode(), validation.MAX_PID),
        )
    except ValueError:
        return None
    return found if found.pid == os.getppid() else None


class NodeCollector(Collector):
    """Collects the families of a registry, and those of this agent's workers.

    Args:
        registry: The registry.
        sums: What is summed over the ranks; None to have it of each rank.
    """

    # A worker collects for one request at a time, and does not answer another one.
    _asking = threading.Lock()

    def __init__(self, registry: CollectorRegistry, sums: NodeSums | None) -> None:
        self._registry = registry
        self._sums = sums
        # Workers that have answered before: others may not be traced at all.
        self._answered: set[Worker] = set()

    def collect(self) -> Iterator[Family]:
        """Return each family once, with the samples of all processes."""
        with self._asking:
            return iter(self._collect())

    def _collect(self) -> Iterable[Family]:
        merged: dict[str, Family] = {}
        workers = AGENT_WORKERS.workers
        sums = self._sums if _is_summed(workers) else None
        with for_node() if sums else nullcontext():
            own = list(self._registry.collect())
        _merge(merged, sums.take(None, own) if sums else own, {})
        up = GaugeMetricFamily(
            names.WORKER_UP.name, names.WORKER_UP.help, labels=names.WORKER_UP.labels
        )
        kind = NODE_METRICS_PAGE if sums else METRICS_PAGE
        replies = ask_workers(workers, kind, _TIMEOUT)
        for worker in workers:
            families = _families(replies.get(worker))
            if families is not None:
                others = sums.take(worker, families) if sums else families
                _merge(merged, others, _labels(worker))
                self._answered.add(worker)
            if worker in replies or worker in self._answered:
                is_up = float(families is not None)
                up.add_metric(list(_labels(worker).values()), is_up)
        self._answered.intersection_update(workers)
        if up.samples:
            merged[up.name] = up
        if sums:
            sums.end_others(workers)
            _merge(merged, sums.families(), {})
        return merged.values()


def _is_summed(workers: Iterable[Worker]) -> bool:
    size = number(AGENT_WORKERS.environ.get("WORLD_SIZE")) or 0
    return len(tuple(workers)) >= _SUMMED_WORKERS or size <= _SUMMED_WORLD


def node_registries(registry: CollectorRegistry) -> Mapping[str, CollectorRegistry]:
    """Return registries with the metrics of a node, by the paths of their pages."""
    found = {}
    for path, sums in (("/metrics", NodeSums()), ("/metrics/ranks", None)):
        found[path] = CollectorRegistry()
        found[path].register(NodeCollector(registry, sums))
    return found


def _families(reply: LocalReply | None) -> list[Family] | None:
    """Return the families in a worker's reply; None without a valid one."""
    if reply is None:
        return None
    try:
        # A worker that has created no store yet has no page.
        return [] if reply.page is None else list(from_fields(reply.page))
    except ValueError as error:
        RECORDER.failures.add(names.ENDPOINT, error)
        return None


def _labels(worker: Worker) -> dict[str, str]:
    values = str(worker.rank), str(worker.local_rank)
    return dict(zip(names.WORKER_UP.labels, values, strict=True))


def _merge(
    merged: dict[str, Family], families: Iterable[Family], labels: dict[str, str]
) -> None:
    """Add families of one process, with its labels on each sample.

    A family that has another type in this process than in an earlier one is left out.
    """
    for family in families:
        known = merged.get(family.name)
        if known is None:
            # A copy, because a collector may return the same one again.
            known = Family(family.name, family.documentation, family.type, family.unit)
            merged[family.name] = known
        if known.type != family.type:
            continue
        for sample in family.samples:
            own = {
                _renamed(name, labels): sample.labels[name] for name in sample.labels
            }
            known.samples.append(sample._replace(labels={**own, **labels}))


def _renamed(name: str, labels: dict[str, str]) -> str:
    """Rename a label of a sample that the node sets, as Prometheus does for targets."""
    return f"exported_{name}" if name in labels else name


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
    checked = _checked_labels(labels)
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
    checked = _checked_labels(labels)
    if sum(map(len, (*checked, *checked.values()))) > _MAX_EXEMPLAR:
        raise ValueError("an exemplar that is too long")
    time = None if timestamp is None else validation.seconds(timestamp)
    return Exemplar(checked, _number(value), time)


def _checked_labels(fields: Any) -> dict[str, str]:
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
