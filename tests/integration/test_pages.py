"""What Alertmanager makes of many alerts, with the configuration of compose."""

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
    """Whoever is on call."""
    webhook = Webhook()
    yield webhook
    webhook.stop()


@pytest.fixture
def alertmanager(tmp_path: Path, webhook: Webhook) -> Iterator[Alertmanager]:
    """The real one."""
    server = Alertmanager(tmp_path, alertmanager_config(tmp_path, webhook.url))
    try:
        wait_until(server.ready)
        yield server
    finally:
        server.stop()


def send(alertmanager: Alertmanager, *alerts: dict[str, Any]) -> None:
    """Be Prometheus."""
    request = urllib.request.Request(
        f"{alertmanager.url}/api/v2/alerts",
        json.dumps([{"labels": labels} for labels in alerts]).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10):
        pass


def named(page: dict[str, Any]) -> set[str]:
    """The names of a page's alerts."""
    return {alert["labels"]["alertname"] for alert in page["alerts"]}


def test_a_thousand_ranks_are_one_page(
    alertmanager: Alertmanager, webhook: Webhook
) -> None:
    """Were there an alert a rank, and of two kinds, it would still be one."""
    barrier = {"run_id": "r", "barrier": "checkpoint/*", "severity": "critical"}
    each = [{"rank": str(rank), "host": f"n{rank // 8}"} for rank in range(1000)]
    stalled = [
        barrier | who | {"alertname": "TracedstoreBarrierStalled"} for who in each
    ]
    send(alertmanager, *stalled, barrier | {"alertname": "TracedstoreBarrierTimedOut"})

    page = webhook.wait_for("TracedstoreBarrierStalled")

    assert len(page["alerts"]) == 1001
    assert page["groupLabels"] == {"run_id": "r", "barrier": "checkpoint/*"}
    assert len(webhook.pages) == 1


def test_what_a_stalled_barrier_explains(
    alertmanager: Alertmanager, webhook: Webhook
) -> None:
    """Is not sent, of the same run; and nobody is called about the telemetry."""
    stalled = {"alertname": "TracedstoreOperationStalled", "severity": "warning"}
    send(
        alertmanager,
        {
            "alertname": "TracedstoreBarrierStalled",
            "severity": "critical",
            "run_id": "r",
            "barrier": "b",
        },
        {"alertname": "TracedstoreTelemetryOff", "severity": "info", "run_id": "r"},
        stalled | {"run_id": "r"},
    )
    webhook.wait_for("TracedstoreBarrierStalled")
    # Groups wait as long as each other, so what is sent later is told later.
    send(alertmanager, stalled | {"run_id": "s"})
    other = webhook.wait_for("TracedstoreOperationStalled")

    assert other["groupLabels"] == {"run_id": "s"}
    assert [named(page) for page in webhook.pages] == [
        {"TracedstoreBarrierStalled"},
        {"TracedstoreOperationStalled"},
    ]
