"""The helper programs that compose runs next to the job."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import wait_until
from support.etcd import free_port
from support.stack import Program
from support.tools import ROOT

JOB = ROOT / "deploy/job"


@pytest.fixture
def pager(tmp_path: Path) -> Iterator[tuple[Program, str]]:
    """Start the pager and yield it with its URL."""
    port = free_port()
    program = Program(tmp_path, sys.executable, JOB / "pager.py", port)
    yield program, f"http://127.0.0.1:{port}/"
    program.stop()


def probe(*urls: str) -> int:
    """Run the health check of compose and return its exit code."""
    return subprocess.run(
        [sys.executable, JOB / "probe.py", *urls],
        capture_output=True,
        timeout=240,
        check=False,
    ).returncode


def test_pager_and_probe(pager: tuple[Program, str]) -> None:
    """The probe succeeds once the pager listens, and the pager prints each page."""
    program, url = pager
    wait_until(lambda: probe(url) == 0)
    page = {
        "status": "firing",
        "groupLabels": {"run_id": "r"},
        "alerts": [
            {
                "status": "firing",
                "labels": {"alertname": "TracedstoreJobStalled", "severity": "warning"},
                "annotations": {
                    "description": "stalled\nrank 3 on n1",
                    "runbook_url": "x#y",
                },
            }
        ],
    }

    with urllib.request.urlopen(url, json.dumps(page).encode(), timeout=60):
        pass

    assert program.log().splitlines() == [
        "PAGE firing run_id=r: 1 alerts",
        "  firing TracedstoreJobStalled (warning)",
        "    stalled",
        "    rank 3 on n1",
        "    x#y",
    ]
    # The probe fails if one of its URLs does not answer.
    assert probe(url, f"http://127.0.0.1:{free_port()}/") == 1
