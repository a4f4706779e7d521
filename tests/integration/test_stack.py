"""From a blocked rank to the alert with its number, through the real programs.

The job, dashboards, rules and configurations are those of docker-compose.yml. Only
addresses and durations differ.
"""

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
from tracedstore.tools.cli.main import main

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

RANKS = 4
STRAGGLER = 2
MISSING = 3
RUN = "e2e"
PROMQL = list(queries("prometheus"))
STALLED = ("TracedstoreJobStalled", "TracedstoreBarrierStalled")


@dataclass
class Stack:
    """The running programs."""

    job: Program
    prometheus: Prometheus
    webhook: Webhook
    otlp: OtlpReceiver
    host: str
    started: float


def prometheus_config(folder: Path, sd: str, alertmanager: str) -> Path:
    """Write compose's Prometheus configuration with local addresses."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["training"]["http_sd_configs"][0] |= {"url": sd, "refresh_interval": "500ms"}
    jobs["training-files"]["file_sd_configs"] = [
        {"files": [str(folder / "targets.json")]}
    ]
    alertmanagers = [{"static_configs": [{"targets": [alertmanager]}]}]
    return configured(
        "deploy/prometheus/prometheus.yml",
        folder / "prometheus.yml",
        **{
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules(folder))],
            "alerting": {"alertmanagers": alertmanagers},
            "scrape_configs": [jobs[name] for name in ("training", "training-files")],
        },
    )


def rules(folder: Path) -> Path:
    """Write the committed rules with a `for` of one second."""
    text = re.sub(r"for: \d+m", "for: 1s", RULES.read_text("utf-8"))
    (folder / "rules.yaml").write_text(text)
    return folder / "rules.yaml"


def start_job(folder: Path, etcd: EtcdServer, otlp: str) -> Program:
    """Start compose's job with torchrun."""
    torchrun = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run")
    return Program(
        folder,
        *torchrun,
        *("--nnodes", 1, "--nproc-per-node", RANKS, "--rdzv-id", RUN),
        *("--rdzv-backend", "traced-etcd"),
        *("--rdzv-endpoint", f"127.0.0.1:{etcd.port}"),
        ROOT / "deploy/job/train.py",
        *("--step-seconds", 0.1, "--late-seconds", 0.3, "--checkpoint-every", 44),
        *("--straggler", STRAGGLER, "--missing", MISSING, "--stuck-seconds", 300),
        *("--warn-after", 0.5, "--barrier-timeout", 600),
        *("--load-seconds", 0, "--fault-at", 10**6),
        env={
            "TRACEDSTORE_RUN_ID": RUN,
            "TRACEDSTORE_HTTP_PORT": str(free_port()),
            "TRACEDSTORE_LOG_FORMAT": "json",
            # The panels about a stalled job have data while rank 3 is stuck.
            "TRACEDSTORE_STALL_AFTER": "1",
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
    """Start the job and the monitoring programs."""
    folder = tmp_path_factory.mktemp("stack")
    started = time.time()
    with ExitStack() as cleanup:
        webhook, otlp = Webhook(), OtlpReceiver()
        cleanup.callback(webhook.stop)
        cleanup.callback(otlp.stop)
        job = start_job(folder, etcd_server, otlp.url)
        cleanup.callback(job.stop)
        alertmanager = Alertmanager(folder, alertmanager_config(folder, webhook.url))
        cleanup.callback(alertmanager.stop)
        (serving,) = wait_until(lambda: job.events(names.TELEMETRY_SERVING))
        sd = serving["url"].replace("/metrics", "/sd")
        config = prometheus_config(folder, sd, urlsplit(alertmanager.url).netloc)
        prometheus = Prometheus(folder, config)
        cleanup.callback(prometheus.stop)
        wait_until(prometheus.ready)
        wait_until(alertmanager.ready)
        # Discovery has a node after the first barrier of one of its ranks.
        (discovered,) = wait_until(lambda: get(sd))
        store = f"tcp://{wait_until(lambda: server(job))}"
        command = ["sd", "--store", store, "--output", str(folder / "targets.json")]
        assert main(command) == 0
        host = discovered["labels"]["host"]
        yield Stack(job, prometheus, webhook, otlp, host, started)


def server(job: Program) -> str | None:
    """Return the address of the ranks' store from their events, or None."""
    failed = [e for e in job.events(names.OPERATION_FAILED) if "rank" in e]
    return str(failed[0]["server"]) if failed else None


class TestDiscovery:
    """Prometheus discovers the node, whose samples have the ranks."""

    @pytest.mark.parametrize("job", ["training", "training-files"])
    def test_targets(self, stack: Stack, job: str) -> None:
        """The target from the agent's /sd page and from a file is the node."""
        (target,) = wait_until(lambda: stack.prometheus.targets(job))

        assert target["labels"] == {
            "job": job,
            "instance": target["labels"]["instance"],
            "run_id": RUN,
            "host": stack.host,
        }

    def test_ranks(self, stack: Stack) -> None:
        """Samples of all ranks have labels of the rank and of the target."""
        query = f'{names.WORKER_UP.name}{{job="training"}} == 1'

        series = wait_until(
            lambda: (
                found if len(found := stack.prometheus.query(query)) == RANKS else None
            )
        )

        assert sorted(
            (one["metric"]["rank"], one["metric"]["local_rank"]) for one in series
        ) == [(str(rank), str(rank)) for rank in range(RANKS)]
        assert {one["metric"]["run_id"] for one in series} == {RUN}
        assert {one["metric"]["host"] for one in series} == {stack.host}
        (recorded,) = wait_until(
            lambda: stack.prometheus.query('job_run_id:up:sum{job="training"}')
        )
        assert recorded["value"][1] == str(RANKS)

    def test_metrics_are_well_formed(self, stack: Stack) -> None:
        """Promtool accepts the metrics of the agent and of all ranks."""
        for event in stack.job.events(names.TELEMETRY_SERVING):
            with urllib.request.urlopen(event["url"], timeout=60) as page:
                done = run("promtool", "check", "metrics", stdin=page.read().decode())
            assert (done.returncode, done.stderr) == (0, ""), event


class TestAlerts:
    """Alerts and events have the blocked rank."""

    def test_notification(self, stack: Stack) -> None:
        """A run has one alert, whose text has rank and host in three lines."""

        def named() -> dict[str, Any] | None:
            alerts = get(f"{stack.prometheus.url}/api/v1/alerts")["data"]["alerts"]
            firing = [
                alert
                for alert in alerts
                if alert["state"] == "firing" and alert["labels"]["job"] == "training"
            ]
            text = str([alert["annotations"]["description"] for alert in firing])
            is_named = f"rank {MISSING} on {stack.host}" in text
            if not is_named or len(firing) != 1:
                return None
            # It is critical until the missing rank has been asked.
            return firing[0] if firing[0]["labels"]["severity"] == "warning" else None

        alert = wait_until(named)
        page = stack.webhook.wait_for(alert["labels"]["alertname"])

        # The diagnosis of the job has the verdict, or the barrier does before.
        assert alert["labels"]["alertname"] in STALLED
        stalled, who, action = alert["annotations"]["description"].splitlines()
        assert stalled.startswith(f"Run {RUN} ")
        assert f"rank {MISSING} on {stack.host}" in who
        assert action.endswith(f"On {stack.host}: tracedstore status --run-id {RUN}")
        assert alert["annotations"]["runbook_url"].startswith("docs/runbook.md#")
        assert page["groupLabels"] == {"run_id": RUN}
        assert page["status"] == "firing"

    def test_event(self, stack: Stack) -> None:
        """The job's log has the same rank, for sites that alert on logs."""
        events = wait_until(
            lambda: [
                event
                for event in stack.job.events(names.BARRIER_WAITING)
                if event["barrier_family"] == "checkpoint/*"
            ]
        )

        assert events[-1]["missing_ranks"] == [MISSING]

    def test_straggler(self, stack: Stack) -> None:
        """The dashboard shows the rank that arrives last at the steps."""
        (query,) = [q for q in PROMQL if q.panel == "Last arrivals by rank"]

        def last_arrivals() -> dict[str, float] | None:
            series = run_query(stack, query)
            counts = {s["metric"]["rank"]: float(s["value"][1]) for s in series}
            return counts if sum(counts.values()) >= 5 else None

        counts = wait_until(last_arrivals)

        assert max(counts, key=counts.__getitem__) == str(STRAGGLER), counts


def run_query(stack: Stack, query: Query) -> list[dict[str, Any]]:
    """Run a panel's query on one of the two Prometheus jobs that scrape the node."""
    text = query.text.replace('job=~"$job"', 'job=~"training"')
    return stack.prometheus.query(filled(text, window="60s"))


# Panels about what this job does not have: their series begin with the first one.
QUIET = {
    "Calls without a span",
    "Events dropped",
    "Ended by TRACEDSTORE_ON_STALL",
    "Failures of the telemetry",
    "Failed requests",
    "Recoveries",
    # Runs in another state than this one.
    "Runs by state",
}
# Queries about ranks that do not answer.
QUIET_QUERIES = {
    "Ranks B",
    "Ranks scraped B",
    "Runs, the worst first E",
    # A part has no series before its first failure.
    "Runs, the worst first H",
}


class TestDashboards:
    """Every panel has data, but for the quiet ones."""

    def test_query(self, stack: Stack, subtests: pytest.Subtests) -> None:
        """A query returns data with the labels of its legend."""
        for query in PROMQL:
            with subtests.test(query=f"{query.panel} {query.target['refId']}"):
                name = f"{query.panel} {query.target['refId']}"
                if query.panel in QUIET or name in QUIET_QUERIES:
                    run_query(stack, query)
                    continue
                # The job stalls at its first checkpoint, after 44 steps.
                series = wait_until(partial(run_query, stack, query))

                legend = set(
                    re.findall(r"\{\{(\w+)\}\}", query.target.get("legendFormat", ""))
                )
                labels = {label for each in series for label in each["metric"]}
                assert legend <= labels, query

    def test_missing(self, stack: Stack) -> None:
        """The table has rank and host of the missing rank."""
        (query,) = [q for q in PROMQL if q.panel == "Who is missing"]

        def found() -> dict[str, str] | None:
            rows = run_query(stack, query)
            # Before the missing rank was asked, there is no cause.
            return (
                rows[0]["metric"] if rows and rows[0]["metric"].get("cause") else None
            )

        assert wait_until(found) == {
            "barrier": "checkpoint/*",
            "missing_rank": str(MISSING),
            "missing_host": stack.host,
            "cause": "busy",
        }


class TestExemplars:
    """Exemplars on panels link to traces that exist."""

    def test_traces_were_exported(self, stack: Stack) -> None:
        """Every exemplar in Prometheus has the ids of an exported span."""
        series = f"{names.OPERATION_DURATION.name}_bucket"

        def stored() -> list[dict[str, str]]:
            return stack.prometheus.exemplars(series, stack.started, time.time())

        exemplars = wait_until(stored)

        def not_exported() -> list[dict[str, str]]:
            spans = stack.otlp.spans
            return [
                labels
                for labels in exemplars
                if labels["span_id"] not in spans.get(labels["trace_id"], ())
            ]

        # The exporter may not have sent a batch of spans yet.
        wait_until(lambda: not not_exported())
