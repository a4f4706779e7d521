"""From a rank that is stuck to a page that names it, through the real programs.

The job is the one of docker-compose.yml, with the committed dashboards, rules and
configurations; only addresses and durations are those of a test.
"""

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from integration.harness import wait_until
from support.dashboards import RULES, Query, filled, queries
from support.etcd import EtcdServer, free_port
from support.stack import (
    Alertmanager,
    OtlpReceiver,
    Program,
    Prometheus,
    Webhook,
    alertmanager_config,
    configured,
    get,
)
from support.tools import ROOT, run
from tracedstore import names
from tracedstore.cli.main import main

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.timeout(90)]

RANKS = 4
STRAGGLER = 2
MISSING = 3
RUN = "e2e"
PROMQL = list(queries("prometheus"))


@dataclass
class Stack:
    """All of it."""

    job: Program
    prometheus: Prometheus
    webhook: Webhook
    otlp: OtlpReceiver
    host: str
    started: float


def prometheus_config(folder: Path, sd: str, agent: str, alertmanager: str) -> Path:
    """Take the scrape configuration of compose, at this machine's addresses."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["training"]["http_sd_configs"][0] |= {"url": sd, "refresh_interval": "500ms"}
    jobs["training-files"]["file_sd_configs"] = [
        {"files": [str(folder / "targets.json")]}
    ]
    jobs["agents"]["static_configs"] = [
        {"targets": [agent], "labels": {"run_id": RUN, "host": "agent"}}
    ]
    alertmanagers = [{"static_configs": [{"targets": [alertmanager]}]}]
    return configured(
        "deploy/prometheus/prometheus.yml",
        folder / "prometheus.yml",
        **{
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules(folder))],
            "alerting": {"alertmanagers": alertmanagers},
            "scrape_configs": [
                jobs[name] for name in ("training", "training-files", "agents")
            ],
        },
    )


def rules(folder: Path) -> Path:
    """Take the committed rules, and be quick about them."""
    text = re.sub(r"for: \d+m", "for: 1s", RULES.read_text("utf-8"))
    (folder / "rules.yaml").write_text(text)
    return folder / "rules.yaml"


def start_job(folder: Path, etcd: EtcdServer, otlp: str) -> Program:
    """Run the job of compose, with torchrun."""
    torchrun = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run")
    return Program(
        folder,
        *torchrun,
        *("--nnodes", 1, "--nproc-per-node", RANKS, "--rdzv-id", RUN),
        *("--rdzv-backend", "traced-etcd-v2"),
        *("--rdzv-endpoint", f"127.0.0.1:{etcd.port}"),
        ROOT / "deploy/job/train.py",
        *("--step-seconds", 0.1, "--late-seconds", 0.3, "--checkpoint-every", 44),
        *("--straggler", STRAGGLER, "--missing", MISSING, "--stuck-seconds", 300),
        *("--warn-after", 0.5, "--barrier-timeout", 120),
        env={
            "TRACEDSTORE_RUN_ID": RUN,
            "TRACEDSTORE_HTTP_PORT": str(free_port()),
            "TRACEDSTORE_LOG_FORMAT": "json",
            "TRACEDSTORE_TRACING": "1",
            "OTEL_SERVICE_NAME": "training",
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OMP_NUM_THREADS": "1",
        },
    )


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer
) -> Iterator[Stack]:
    """The job, and those who watch it, until its barrier is stalled."""
    folder = tmp_path_factory.mktemp("stack")
    started = time.time()
    with ExitStack() as ending:
        webhook, otlp = Webhook(), OtlpReceiver()
        ending.callback(webhook.stop)
        ending.callback(otlp.stop)
        job = start_job(folder, etcd_server, otlp.url)
        ending.callback(job.stop)
        alertmanager = Alertmanager(folder, alertmanager_config(folder, webhook.url))
        ending.callback(alertmanager.stop)
        served = wait_until(lambda: all_serving(job), timeout=40)
        sd = next(one["url"] for one in served if "rank" in one)
        agent = next(one["url"] for one in served if "rank" not in one)
        sd = sd.replace("/metrics", "/sd")
        config = prometheus_config(
            folder, sd, urlsplit(agent).netloc, urlsplit(alertmanager.url).netloc
        )
        prometheus = Prometheus(folder, config)
        ending.callback(prometheus.stop)
        wait_until(prometheus.ready)
        wait_until(alertmanager.ready)
        # The ranks are in the list once they have come to their first barrier.
        listed = wait_until(lambda: listing(sd), timeout=20)
        store = f"tcp://{wait_until(lambda: server(job))}"
        command = ["sd", "--store", store, "--output", str(folder / "targets.json")]
        assert main(command) == 0
        host = listed[0]["labels"]["host"]
        yield Stack(job, prometheus, webhook, otlp, host, started)


def all_serving(job: Program) -> list[dict[str, Any]] | None:
    """Give what the agent and all ranks said about where they serve."""
    job.check()
    found = job.events(names.TELEMETRY_SERVING)
    return found if len(found) == RANKS + 1 else None


def server(job: Program) -> str | None:
    """Give the address of the ranks' store, which their events name."""
    failed = [one for one in job.events(names.OPERATION_FAILED) if "rank" in one]
    return str(failed[0]["server"]) if failed else None


def listing(sd: str) -> list[dict[str, Any]] | None:
    """Ask one rank where all of them are."""
    found: list[dict[str, Any]] = get(sd)
    return found if len(found) == RANKS else None


class TestDiscovery:
    """Prometheus finds the ranks."""

    @pytest.mark.parametrize("job", ["training", "training-files"])
    def test_targets(self, stack: Stack, job: str) -> None:
        """Through a rank's own list, and through a file; each with its labels."""
        found = wait_until(
            lambda: (
                targets
                if len(targets := stack.prometheus.targets(job)) == RANKS
                else None
            )
        )

        labels = sorted(
            (one["labels"]["rank"], one["labels"]["local_rank"]) for one in found
        )
        assert labels == [(str(rank), str(rank)) for rank in range(RANKS)]
        assert {one["labels"]["run_id"] for one in found} == {RUN}
        assert {one["labels"]["host"] for one in found} == {stack.host}

    def test_metrics_are_well_formed(self, stack: Stack) -> None:
        """Those of the agent and of all ranks, as promtool sees them."""
        for served in stack.job.events(names.TELEMETRY_SERVING):
            with urllib.request.urlopen(served["url"], timeout=10) as page:
                done = run("promtool", "check", "metrics", stdin=page.read().decode())
            assert (done.returncode, done.stderr) == (0, ""), served


class TestAlerts:
    """The one that is stuck is named to whoever is on call."""

    def test_page(self, stack: Stack) -> None:
        """One page for the barrier, with the rank and its host."""
        page = stack.webhook.wait_for("TracedstoreBarrierStalled")

        assert page["groupLabels"] == {"run_id": RUN, "barrier": "checkpoint/*"}
        stalled = [
            alert
            for alert in page["alerts"]
            if alert["labels"]["alertname"] == "TracedstoreBarrierStalled"
        ]
        assert {alert["labels"]["job"] for alert in stalled} <= {
            "training",
            "training-files",
        }
        for alert in stalled:
            assert alert["status"] == "firing"
            assert alert["labels"]["severity"] == "critical"
            assert alert["annotations"]["description"] == (
                f"Run {RUN} waits at barrier checkpoint/* for 1 ranks. Missing (64 at"
                f" most are named): rank {MISSING} on {stack.host};"
            )
            runbook = alert["annotations"]["runbook_url"]
            assert runbook == "docs/runbook.md#tracedstorebarrierstalled"

    def test_the_job_says_the_same(self, stack: Stack) -> None:
        """In its log, for sites that alert on that."""
        told = wait_until(
            lambda: [
                event
                for event in stack.job.events(names.BARRIER_WAITING)
                if event["barrier_family"] == "checkpoint/*"
            ]
        )

        assert told[-1]["missing_ranks"] == [MISSING]

    def test_straggler(self, stack: Stack) -> None:
        """Who came last to the steps, on the dashboard."""
        (query,) = [one for one in PROMQL if one.panel == "Last arrivals by rank"]

        def times() -> dict[str, float] | None:
            found = answer(stack, query)
            counts = {one["metric"]["rank"]: float(one["value"][1]) for one in found}
            return counts if sum(counts.values()) >= 5 else None

        counts = wait_until(times)

        assert max(counts, key=counts.__getitem__) == str(STRAGGLER), counts


def answer(stack: Stack, query: Query) -> list[dict[str, Any]]:
    """Ask as the panel does, of one of the two jobs that have the ranks."""
    text = query.text.replace('job=~"$job"', 'job=~"training|agents"')
    return stack.prometheus.query(filled(text, window="60s"))


class TestDashboards:
    """Every panel has something to show."""

    @pytest.mark.parametrize(
        "query", PROMQL, ids=lambda query: f"{query.panel} {query.target['refId']}"
    )
    def test_query(self, stack: Stack, query: Query) -> None:
        """It returns data, with the labels that its legend shows."""
        found = wait_until(lambda: answer(stack, query))

        legend = set(re.findall(r"\{\{(\w+)\}\}", query.target.get("legendFormat", "")))
        labels = {label for one in found for label in one["metric"]}
        assert legend <= labels, query

    def test_missing(self, stack: Stack) -> None:
        """The table has the one that is missing, by rank and by host."""
        (query,) = [one for one in PROMQL if one.panel == "Who is missing"]

        (row,) = wait_until(lambda: answer(stack, query))

        assert row["metric"] == {
            "run_id": RUN,
            "barrier": "checkpoint/*",
            "missing_rank": str(MISSING),
            "missing_host": stack.host,
        }


class TestExemplars:
    """A dot on a panel opens a trace that is there."""

    def test_traces_were_exported(self, stack: Stack) -> None:
        """Every exemplar that Prometheus has is a span that the ranks exported."""
        series = f"{names.OPERATION_DURATION.name}_bucket"

        def found() -> list[dict[str, str]]:
            return stack.prometheus.exemplars(series, stack.started, time.time())

        exemplars = wait_until(found)

        def not_exported() -> list[dict[str, str]]:
            spans = stack.otlp.spans
            return [
                labels
                for labels in exemplars
                if labels["span_id"] not in spans.get(labels["trace_id"], ())
            ]

        # A batch of spans may be on its way.
        wait_until(lambda: not not_exported(), timeout=10)
