"""One hang of each scenario of ``make bench-hangs``: the ranks that cause it are named.

The ranks are real processes and run torch's own protocols.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hangs.scenarios import SCENARIOS

ROOT = Path(__file__).parent.parent.parent
SEED = 5
# torch raises an exception of its own in place of the one that the wait raised, or the
# exception has the names in its text, or the call does not return.
WITHOUT_NOTE = {"init_barrier", "elastic_barrier", "server_stopped"}
# Of a TCPStore, of a FileStore and of gloo, and of an EtcdStore.
TYPES = {"DistStoreError", "DistNetworkError", "RuntimeError", "LookupError"}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.etcd,
    pytest.mark.timeout(400),
    # All of them are made at the same time, once.
    pytest.mark.xdist_group("hangs"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Make one hang of each scenario; return what they led to, by scenario."""
    results = tmp_path_factory.mktemp("hangs") / "hangs.jsonl"
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "hangs"),
            *("--hangs", str(len(SCENARIOS)), "--seed", str(SEED), "--jobs", "6"),
            *("--max-world-size", "4", "--results", str(results)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert results.exists(), run.stdout + run.stderr
    lines = map(json.loads, results.read_text().splitlines())
    return {outcome["scenario"]: outcome for outcome in lines}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_hang(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """Only the victims are named, by a few ranks; nobody is named in a slow job."""
    outcome = outcomes[name]

    assert outcome["result"] == "right", outcome
    # Two processes look, and two more if these take longer than 6 s.
    assert outcome["reporters"] <= 4, outcome
    if SCENARIOS[name].harmless:
        assert (outcome["errors"], outcome["stalls"]) == ({}, [])


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - WITHOUT_NOTE - {"slow"}))
def test_exceptions_have_the_verdict_as_a_note(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    """Type, text and arguments are torch's, and the exception can be pickled."""
    outcome = outcomes[name]

    assert outcome["errors"], outcome
    for error in outcome["errors"].values():
        (note,) = [one for one in error["notes"] if "waiting in" in one]
        assert note.startswith("tracedstore: waiting in ")
        assert error["type"] in TYPES
        assert error["args"] == [error["message"]]
        assert "tracedstore" not in error["message"]
        assert error["pickled"]
