"""Grouping and inhibition of alerts by Alertmanager, as compose configures it."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import wait_until
from support.stack import Alertmanager, Webhook, alertmanager_config

pytestmark = pytest.mark.processes


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """Return the receiver of notifications."""
    webhook = Webhook()
    yield webhook
    webhook.stop()


@pytest.fixture
def alertmanager(tmp_path: Path, webhook: Webhook) -> Iterator[Alertmanager]:
    """Start a real Alertmanager."""
    server = Alertmanager(tmp_path, alertmanager_config(tmp_path, webhook.url))
    try:
        wait_until(server.ready)
        yield server
    finally:
        server.stop()


def send(alertmanager: Alertmanager, *alerts: dict[str, Any]) -> None:
    """Send alerts as Prometheus does."""
    request = urllib.request.Request(
        f"{alertmanager.url}/api/v2/alerts",
        json.dumps([{"labels": labels} for labels in alerts]).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60):
        pass


def alert_names(page: dict[str, Any]) -> set[str]:
    """Return the names of a notification's alerts."""
    return {alert["labels"]["alertname"] for alert in page["alerts"]}


def test_alerts_of_one_barrier_are_grouped(
    alertmanager: Alertmanager, webhook: Webhook
) -> None:
    """Alerts of 1000 ranks and of two kinds are one notification."""
    barrier = {"run_id": "r", "barrier": "checkpoint/*", "severity": "critical"}
    ranks = [{"rank": str(rank), "host": f"n{rank // 8}"} for rank in range(1000)]
    stalled = [
        barrier | rank | {"alertname": "TracedstoreBarrierStalled"} for rank in ranks
    ]
    send(alertmanager, *stalled, barrier | {"alertname": "TracedstoreBarrierTimedOut"})

    page = webhook.wait_for("TracedstoreBarrierStalled")

    assert len(page["alerts"]) == 1001
    assert page["groupLabels"] == {"run_id": "r", "barrier": "checkpoint/*"}
    assert len(webhook.pages) == 1


@pytest.mark.parametrize(
    "source", ["TracedstoreBarrierStalled", "TracedstoreJobStalled"]
)
def test_stall_inhibits_stalled_operations(
    alertmanager: Alertmanager, webhook: Webhook, source: str
) -> None:
    """Stalled operations of the same run are not sent, nor telemetry alerts."""
    stalled = {"alertname": "TracedstoreOperationStalled", "severity": "warning"}
    send(
        alertmanager,
        {
            "alertname": source,
            "severity": "critical",
            "run_id": "r",
        },
        {"alertname": "TracedstoreTelemetryOff", "severity": "info", "run_id": "r"},
        stalled | {"run_id": "r"},
    )
    webhook.wait_for(source)
    # All groups wait equally long, so a later alert is notified later.
    send(alertmanager, stalled | {"run_id": "s"})
    other = webhook.wait_for("TracedstoreOperationStalled")

    assert other["groupLabels"] == {"run_id": "s"}
    assert [alert_names(page) for page in webhook.pages] == [
        {source},
        {"TracedstoreOperationStalled"},
    ]
