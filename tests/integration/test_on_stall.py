"""``TRACEDSTORE_ON_STALL=abort`` below a real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import python_path

pytestmark = pytest.mark.processes

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1


def run_job(scenario: str, folder: Path) -> tuple[int, dict[str, str]]:
    """Run a job; return its exit code, and what its ranks wrote by attempt and rank."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORLD_SIZE), "--max-restarts", "1"),
            *("--log-dir", str(folder), "--redirects", "3"),
            *("--module", "integration.children.restarted_rank", scenario),
        ],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            # Else gloo reads addresses of the first attempt, with torch alone too.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TRACEDSTORE_LOG_FORMAT": "json",
            "TRACEDSTORE_ON_STALL": "abort",
            "TRACEDSTORE_STALL_AFTER": "2",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    written = {
        "/".join(file.parts[-3:]): file.read_text()
        for file in folder.rglob("attempt_*/*/*")
        if file.name in ("stdout.log", "stderr.log", "error.json")
    }
    return done.returncode, written


def events_of(written: dict[str, str], event: str) -> list[dict[str, Any]]:
    """Return the events of all ranks and attempts."""
    lines = (line for text in written.values() for line in text.splitlines())
    found = [json.loads(line) for line in lines if line.startswith('{"')]
    return [one for one in found if one.get("event") == event]


def texts_of(written: dict[str, str], end: str) -> list[str]:
    """Return what files of a name have."""
    return [text for file, text in written.items() if file.endswith(end)]


@pytest.mark.parametrize(
    ("scenario", "cause"), [("skips", "mismatch"), ("leaves", "gone")]
)
def test_job_is_restarted_and_completes(
    scenario: str, cause: str, tmp_path: Path
) -> None:
    """One rank ends with the verdict as its error; the next attempt completes."""
    code, written = run_job(scenario, tmp_path)

    assert code == 0, written
    out = "".join(texts_of(written, "stdout.log"))
    for rank in range(WORLD_SIZE):
        assert f"rank {rank} completes attempt 1" in out
    assert "completes attempt 0" not in out
    # One ended; torchrun ended the others. What it had printed is not lost.
    (aborted,) = events_of(written, "job.aborted")
    assert f"rank {aborted['rank']} begins attempt 0" in out
    assert (aborted["cause"], aborted["awaited_ranks"]) == (cause, [LAST])
    assert aborted["rank"] != LAST or cause == "mismatch"
    assert aborted["waited_seconds"] >= 4
    (error,) = texts_of(written, f"attempt_0/{aborted['rank']}/error.json")
    message = json.loads(error)["message"]["message"]
    assert message.startswith(f"StalledJobError: waiting in {aborted['phase']} for")
    assert f"[{cause}: " in message
    # It was reported before.
    assert events_of(written, "job.stalled")


def test_busy_rank_is_waited_for(tmp_path: Path) -> None:
    """What passes by itself ends no process, however long it takes."""
    code, written = run_job("busy", tmp_path)

    out = "".join(texts_of(written, "stdout.log"))
    assert code == 0, written
    assert {one["cause"] for one in events_of(written, "job.stalled")} == {"busy"}
    assert out.count("completes attempt 0") == WORLD_SIZE
    assert not events_of(written, "job.aborted")
