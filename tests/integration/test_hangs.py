"""One hang of each scenario of ``make bench-hangs``: the ranks that cause it are named.

`make test` makes a few of them, and `make soak` all.

The ranks are real processes and run torch's own protocols.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hangs.nodes import missing
from hangs.scenarios import SCENARIOS

ROOT = Path(__file__).parent.parent.parent
SEED = 5
# The exception has the names in its text, the call does not return or does not fail, or
# only gloo fails.
WITHOUT_NOTE = {
    "elastic_barrier",
    "groups_in_another_order",
    "polls",
    "second_node",
    "server_stopped",
    "short_waits",
}
# Those of `make test`: torch's barrier and that of torchelastic, a server that ends,
# too many ranks, two ranks in the place of each, short waits, groups in another order,
# and jobs that are only slow, or repeat waits.
QUICK = {
    "all_started_twice",
    "elastic_barrier",
    "groups_in_another_order",
    "init_barrier",
    "retries",
    "server_killed",
    "short_waits",
    "slow",
    "too_many",
}
# Of a TCPStore, of a FileStore and of gloo, and of an EtcdStore.
TYPES = {"DistStoreError", "DistNetworkError", "RuntimeError", "LookupError"}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.etcd,
]


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a benchmark of hangs, one at a time."""
    path = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *arguments, "--jobs", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


def outcome_of(scenario: str, results: Path) -> dict[str, Any]:
    """Make one hang of a scenario; return what it led to."""
    run = run_module(
        *("hangs", "--hangs", "1", "--seed", str(SEED)),
        # Hangs go through the scenarios in order.
        *("--first", str(sorted(SCENARIOS).index(scenario))),
        *("--max-world-size", "4", "--results", str(results)),
    )
    assert results.exists(), run.stdout + run.stderr
    outcome: dict[str, Any] = json.loads(results.read_text())
    return outcome


@pytest.mark.soak
def test_collective_below_each_launcher(tmp_path: Path) -> None:
    """The rank that does not come is named; on two nodes where there can be some."""
    results = tmp_path / "hangs.jsonl"
    run = run_module(
        *("hangs.collective_bars", "--ranks", "", "--only", "all_reduce"),
        *("--results", str(results)),
    )

    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    launchers = {one["case"].rpartition(", ")[2] for one in outcomes}
    expected = {"torchrun", "spawn"} | (set() if missing() else {"two nodes"})
    assert launchers == expected, run.stdout + run.stderr
    assert {one["result"] for one in outcomes} == {"right"}, outcomes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.soak)
        for name in sorted(SCENARIOS)
    ],
)
def test_hang(name: str, tmp_path: Path) -> None:
    """Only the victims are named, by a few ranks; nobody is named in a slow job.

    The exceptions have the verdict as a note. Their type, text and arguments are
    torch's, and they can be pickled.
    """
    if SCENARIOS[name].nodes and (why := missing()):
        pytest.skip(f"no two nodes: {why}")

    outcome = outcome_of(name, tmp_path / "hangs.jsonl")

    assert outcome["result"] == "right", outcome
    # Two processes look, and two more if these take longer than 6 s.
    assert outcome["reporters"] <= 4, outcome
    if name == "too_many":
        check_attempts(outcome)
    if SCENARIOS[name].harmless:
        assert (outcome["errors"], outcome["stalls"]) == ({}, [])
    elif name not in WITHOUT_NOTE:
        assert outcome["errors"], outcome
        for error in outcome["errors"].values():
            check_note(error)


def check_attempts(outcome: dict[str, Any]) -> None:
    """A count of too many arrivals comes with the processes of each attempt."""
    size = len(outcome["survivors"])
    count, first, second = outcome["stalls"][0]["evidence"]
    assert count == f"store_based_barrier_key:0 is {2 * size}"
    ranks = f"ranks 0-{size - 1}, pids [-,0-9]+ on "
    assert re.match(rf"registered: attempt 0 \(ended\): {ranks}", first)
    assert re.match(f"registered: attempt 1: {ranks}", second)


def check_note(error: dict[str, Any]) -> None:
    """Check the exception of one rank."""
    (note,) = [one for one in error["notes"] if "waiting in" in one]
    assert note.startswith("tracedstore: waiting in ")
    assert error["type"] in TYPES
    assert error["args"] == [error["message"]]
    assert "tracedstore" not in error["message"]
    assert error["pickled"]
