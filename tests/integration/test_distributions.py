"""The quantiles of the dashboards, computed by a real Prometheus, and the true ones."""

import json
import math
import random
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from integration.harness import wait_until
from support.dashboards import RULES, filled, queries
from support.stack import Prometheus
from tracedstore import names
from tracedstore.export import node_metrics
from tracedstore.export.http_endpoint import metrics_for_agent, pages
from tracedstore.export.http_server import Access, Server
from tracedstore.local.facts import LocalIdentity
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker
from tracedstore.local.sockets import METRICS_PAGE, LocalReply
from tracedstore.recording.counters import BOUNDS, BUCKETS, NANOSECONDS
from tracedstore.recording.operation import METHODS
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.snapshot import Exemplars, Snapshots
from tracedstore.recording.telemetry import NULL_TELEMETRY
from tracedstore.signals.metrics import MetricsCollector

pytestmark = pytest.mark.processes

RANKS = 8
# What a rank counts of each kind of call, in seconds, from 1 ms to 10 minutes.
_RANDOM = random.Random(7)
# Beyond a bound by little is the worst case: the estimate is near the next bound.
_WORST = (0.001001, 0.0313, 1.5, 29.5, 172.0, 599.0)
SAMPLES: dict[str, list[float]] = {
    **{f"all {seconds} s": [seconds] * 40 for seconds in _WORST},
    "spread": [
        min(600.0, max(0.001, _RANDOM.lognormvariate(0, 2))) for _ in range(4_000)
    ],
    "two kinds": [0.0052] * 300 + [90.0] * 100,
}


class Rank:
    """A rank that counts calls which it does not make."""

    def __init__(self, rank: int) -> None:
        self.worker = Worker(rank=rank, local_rank=rank, pid=rank, start_ticks=0)
        self.recorder = Recorder(NULL_TELEMETRY)
        self.registry = CollectorRegistry()
        snapshots = Snapshots(
            self.recorder, Exemplars(self.recorder.series), full=False
        )
        self.registry.register(MetricsCollector(snapshots))

    def count(self, sample: str, seconds: float) -> None:
        """Count a call of each kind: one that may block, another one, a barrier."""
        self.count_call(sample, "get", seconds)
        self.count_call(sample, "set", seconds)
        self.count_barrier(_letters(sample), seconds)

    def count_call(self, store: str, operation: str, seconds: float) -> None:
        """Count a Store call."""
        (method,) = (one for one in METHODS if one.name == operation)
        series = self.recorder.series.of(store, method)
        counts = self.recorder.counters[threading.get_ident()].by_series[series]
        counts[BUCKETS + bisect_left(BOUNDS, int(seconds * 1e9))] += 1
        counts[NANOSECONDS] += int(seconds * 1e9)

    def count_barrier(self, family: str, seconds: float) -> None:
        """Count a barrier that has completed."""
        labels = (family, "completed")
        self.recorder.cold.record((names.BARRIER_DURATION, labels, seconds * 1e9))

    def reply(self, kind: str) -> LocalReply:
        """Return the page that its agent asks for."""
        collect = metrics_for_agent(self.registry, of_node=kind != METRICS_PAGE)
        page = json.loads(json.dumps(collect()))
        return LocalReply(
            identity=LocalIdentity.own(), answer=None, workers=(), page=page
        )


def _letters(sample: str) -> str:
    """Return a name without digits, which would be folded."""
    return "".join(chr(ord(one) + 50) if one.isdigit() else one for one in sample)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """The ranks of a node."""
    ranks = [Rank(rank) for rank in range(RANKS)]
    by_worker = {rank.worker: rank for rank in ranks}

    def ask(workers: Any, kind: str, _timeout: float) -> dict[Worker, LocalReply]:
        return {worker: by_worker[worker].reply(kind) for worker in workers}

    monkeypatch.setattr(AGENT_WORKERS, "workers", tuple(by_worker))
    monkeypatch.setattr(node_metrics, "ask_workers", ask)
    return ranks


@pytest.fixture
def agent(ranks: list[Rank]) -> Iterator[Server]:
    """The endpoint of the agent that serves them."""
    assert ranks
    served = pages(CollectorRegistry(), per_node=True)
    server = Server(served, "127.0.0.1", 0, Access())
    yield server
    server.stop(60)


@pytest.fixture
def prometheus(agent: Server, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with the rules of this project that scrapes the agent."""
    target = {
        "targets": [f"127.0.0.1:{agent.port}"],
        "labels": {"run_id": "r", "host": "n"},
    }
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "training", "static_configs": [target]}],
    }
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    server = Prometheus(tmp_path, path)
    wait_until(server.ready)
    yield server
    server.stop()


def _share(query: str) -> float:
    return float(query.partition("histogram_quantile(")[2].partition(",")[0])


def _true(sample: list[float], share: float) -> float:
    return sorted(sample)[math.ceil(share * len(sample)) - 1]


def test_quantiles(ranks: list[Rank], prometheus: Prometheus) -> None:
    """Each quantile of each dashboard is within 25 % of the true one."""
    asked = {
        query.text
        for query in queries("prometheus")
        if "histogram_quantile" in query.text
    }
    assert {_share(query) for query in asked} >= {0.5, 0.99}
    # The first call of a series has no earlier sample that it is more than.
    for rank in ranks:
        for sample, durations in SAMPLES.items():
            rank.count(sample, durations[0])
    total = f"sum({names.BARRIER_DURATION.name}_count)"

    def counted(calls: int) -> bool:
        return any(float(one["value"][1]) == calls for one in prometheus.query(total))

    wait_until(lambda: counted(RANKS * len(SAMPLES)))
    for sample, durations in SAMPLES.items():
        for position, seconds in enumerate(durations):
            ranks[position % RANKS].count(sample, seconds)
    expected = RANKS * len(SAMPLES) + sum(map(len, SAMPLES.values()))
    wait_until(lambda: counted(expected))
    # The rule is evaluated a moment later.
    barriers = f"sum({_recorded(asked)}{{le='+Inf'}}) * 300"
    least = expected - RANKS * len(SAMPLES) - 1
    wait_until(
        lambda: any(
            float(one["value"][1]) > least for one in prometheus.query(barriers)
        )
    )

    wrong = []
    for query in sorted(asked):
        found = {
            one["metric"].get("store") or one["metric"]["barrier"]: float(
                one["value"][1]
            )
            for one in prometheus.query(filled(query))
        }
        for sample, durations in SAMPLES.items():
            estimate = found.get(sample, found.get(_letters(sample)))
            true = _true(durations, _share(query))
            if estimate is None or not 0.749 <= estimate / true <= 1.251:
                wrong.append((query, sample, true, estimate))
    assert not wrong


def _recorded(asked: set[str]) -> str:
    """Return the series of the recording rule that a quantile of barriers reads."""
    (rule,) = {
        re.findall(r"[(]([a-z_]+:[a-z0-9_:]+)", query)[0]
        for query in asked
        if "barrier, le" in query
    }
    return str(rule)


def test_no_more_series(ranks: list[Rank]) -> None:
    """The page of a node has no more series than the ranks of it have together."""
    # The label sets of an ordinary rank, by `benchmarks/exposition.py`.
    for rank in ranks:
        for operation in ("set", "add", "check", "compare_set", "append"):
            rank.count_call("tcp_store", operation, 1.5)
        for operation in ("get", "wait"):
            rank.count_call("tcp_store", operation, 1.5)
        for family in ("checkpoint/*", "step/*"):
            rank.count_barrier(family, 1.5)

    def series(path: str) -> int:
        page = pages(CollectorRegistry(), per_node=True)[path]("").body
        return sum(line[:1] != b"#" for line in page.splitlines())

    assert series("/metrics") <= series("/metrics/ranks")


def test_sums_never_drop(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank counted stays in the sum when it ends; Prometheus would add it up."""
    page = node_metrics.node_registries(CollectorRegistry())["/metrics"]

    def calls() -> float | None:
        labels = {"barrier": "step", "result": "completed"}
        name = f"{names.BARRIER_DURATION.name}_count"
        return page.get_sample_value(name, labels)

    for rank in ranks:
        rank.count("step", 1.0)
    assert calls() == RANKS
    monkeypatch.setattr(AGENT_WORKERS, "workers", (ranks[1].worker,))
    assert calls() == RANKS
    ranks[1].count("step", 1.0)
    assert calls() == RANKS + 1
