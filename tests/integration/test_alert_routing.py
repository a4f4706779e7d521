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


def test_alerts_of_one_run_are_grouped(
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
    assert page["groupLabels"] == {"run_id": "r"}
    assert len(webhook.pages) == 1


def test_one_incident_is_one_alert(
    alertmanager: Alertmanager, webhook: Webhook
) -> None:
    """Of a stalled run neither warnings nor alerts on logs are sent."""
    stalled = {"alertname": "TracedstoreOperationStalled", "severity": "warning"}
    logs = {"alertname": "TracedstoreJobStalledInLogs", "severity": "critical"}
    source = {"alertname": "TracedstoreJobStalled", "severity": "critical"}
    send(
        alertmanager,
        source | {"run_id": "r"},
        {"alertname": "TracedstoreTelemetryOff", "severity": "info", "run_id": "r"},
        stalled | {"run_id": "r"},
        logs | {"run_id": "r"},
    )
    webhook.wait_for("TracedstoreJobStalled")
    # All groups wait equally long, so a later alert is notified later.
    send(alertmanager, stalled | {"run_id": "s"}, logs | {"run_id": "t"})
    webhook.wait_for("TracedstoreOperationStalled")
    webhook.wait_for("TracedstoreJobStalledInLogs")

    assert {
        page["groupLabels"]["run_id"]: alert_names(page) for page in webhook.pages
    } == {
        "r": {"TracedstoreJobStalled"},
        "s": {"TracedstoreOperationStalled"},
        "t": {"TracedstoreJobStalledInLogs"},
    }
