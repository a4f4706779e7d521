"""Jobs of frameworks that create the process group themselves, below tracedstore-run.

`make test-frameworks` runs them in an environment with the frameworks.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Running, wait_until

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.processes,
    pytest.mark.timeout(600),
]

_BIN = Path(sys.executable).parent
_JOBS = Path(__file__).parent / "jobs"
# Seconds for a job. Ray alone takes half a minute on two cores.
_SECONDS = 250

LAUNCHERS: dict[str, list[object]] = {
    "lightning": [sys.executable, _JOBS / "lightning_job.py", 2],
    "accelerate": [
        *(_BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2),
        *("--main_process_port", 0, _JOBS / "accelerate_job.py"),
    ],
    "ray": [sys.executable, _JOBS / "ray_job.py", 2],
}


class Job:
    """A job of a framework, whose output is written to files of a folder."""

    def __init__(self, folder: Path, *command: object, env: dict[str, str]) -> None:
        self._folder = folder
        folder.mkdir()
        # Ray writes the lines of its workers to standard output.
        shell = ["sh", "-c", 'cd "$0" && exec "$@" > out', folder]
        self._running = Running(folder, "job", *shell, *command, env=env)

    def exit_status(self) -> int:
        """Wait until the job ends."""
        return self._running.exit_status(_SECONDS)

    def weights(self) -> list[str]:
        """Return the result of the job, wherever it was written."""
        file = self._folder / "weights"
        text = self._out() + (file.read_text("utf-8") if file.exists() else "")
        return re.findall(r"^weights .*$", text, re.MULTILINE)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name. Ray puts the process before a line."""
        lines = (self._out() + self._running.errors()).splitlines()
        found = [re.search(r'\{"timestamp": .*\}$', line) for line in lines]
        events = [json.loads(match.group()) for match in found if match]
        return [event for event in events if event["event"] == name]

    def output(self) -> str:
        """Return all that the job has written, for a test that fails."""
        return self._out() + self._running.errors()

    def kill(self) -> None:
        """Kill the job and its descendants."""
        self._running.kill()

    def _out(self) -> str:
        file = self._folder / "out"
        return file.read_text("utf-8", "replace") if file.exists() else ""


@pytest.mark.parametrize("framework", LAUNCHERS)
def test_traced_job(framework: str, tmp_path: Path) -> None:
    """A traced job ends with the result of the bare one, and all ranks are traced."""
    command = LAUNCHERS[framework]
    # Every call is slow, and so emits an event.
    env = {"TRACEDSTORE_SLOW_AFTER": "0", "OMP_NUM_THREADS": "1"}
    bare = Job(tmp_path / "bare", *command, env=env)
    try:
        assert bare.exit_status() == 0, bare.output()
    finally:
        bare.kill()
    traced = Job(tmp_path / "traced", _BIN / "tracedstore-run", *command, env=env)
    try:
        assert traced.exit_status() == 0, traced.output()
    finally:
        traced.kill()

    assert len(bare.weights()) == 1
    assert traced.weights() == bare.weights()
    assert bare.events("store.operation.slow") == []
    ranks = {event.get("rank") for event in traced.events("store.operation.slow")}
    assert ranks >= {0, 1}
    assert traced.events("telemetry.disabled") == []


@pytest.mark.parametrize("framework", LAUNCHERS)
def test_absent_worker(framework: str, tmp_path: Path) -> None:
    """A worker that stays away is named by the others, and no other one is."""
    job = Job(
        tmp_path / "job",
        *(_BIN / "tracedstore-run", *LAUNCHERS[framework], 1),
        env={"TRACEDSTORE_STALL_AFTER": "5", "OMP_NUM_THREADS": "1"},
    )
    try:
        stalls = wait_until(lambda: job.events("job.stalled"), _SECONDS)
    finally:
        job.kill()

    assert {tuple(stall["awaited_ranks"]) for stall in stalls} == {(1,)}, stalls
    assert all(stall["rank"] == 0 for stall in stalls)
