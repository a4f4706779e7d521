"""The metrics of a node: torchrun's agent, and its workers with their ranks.

The agent asks its workers over their Unix sockets, all at once. What does not answer is
a sample of its own, and never a failed scrape.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from tracedstore import names
from tracedstore.export.family_fields import from_fields
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker, ask_workers
from tracedstore.local.sockets import METRICS_PAGE, LocalReply
from tracedstore.recording.recorder import RECORDER

# Seconds for all workers to answer. Prometheus waits for 10 s by default.
_TIMEOUT: Final = 2.0


class NodeCollector(Collector):
    """Collects the families of a registry, and those of this agent's workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        # Workers that have answered before: others may not be traced at all.
        self._answered: set[Worker] = set()

    def collect(self) -> Iterator[Family]:
        """Return each family once, with the samples of all processes."""
        merged: dict[str, Family] = {}
        _merge(merged, self._registry.collect(), {})
        up = GaugeMetricFamily(
            names.WORKER_UP.name, names.WORKER_UP.help, labels=names.WORKER_UP.labels
        )
        workers = AGENT_WORKERS.workers
        replies = ask_workers(workers, METRICS_PAGE, _TIMEOUT)
        for worker in workers:
            families = _families(replies.get(worker))
            if families is not None:
                _merge(merged, families, _labels(worker))
                self._answered.add(worker)
            if worker in replies or worker in self._answered:
                is_up = float(families is not None)
                up.add_metric(list(_labels(worker).values()), is_up)
        self._answered.intersection_update(workers)
        if up.samples:
            merged[up.name] = up
        return iter(merged.values())


def node_registry(registry: CollectorRegistry) -> CollectorRegistry:
    """Return a registry with the metrics of a node."""
    found = CollectorRegistry()
    found.register(NodeCollector(registry))
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
