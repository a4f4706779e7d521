"""What becomes of a BarrierTimeout in a worker of torchrun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]


class TestErrorFile:
    """torchelastic's error file is what schedulers show of a job that failed."""

    def test_readable(self, tmp_path: Path) -> None:
        """It says who was missing and where, and so does torchrun's own summary."""
        error_file = tmp_path / "error.json"

        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--standalone", "--nproc-per-node", "2"),
                *("--log-dir", str(tmp_path / "logs")),
                *("--module", "integration.children.elastic_rank"),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(TESTS),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
            },
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

        assert done.returncode == 1, done.stderr
        message = json.loads(error_file.read_text("utf-8"))["message"]
        said = message["message"]
        assert said.startswith(
            "BarrierTimeout: Timed out waiting on barrier on rank 0, for key prefix:"
            " checkpoint/7 (world_size=2, missing_ranks=[1 on "
        )
        assert said.endswith(
            f"timeout=1.0): missing 1 of 2: {socket.gethostname()} (rank 1)"
        )
        # No "During handling of the above exception" with the store's own words.
        calls = message["extraInfo"]["py_callstack"]
        assert calls.count("Traceback") == 1
        assert said.removeprefix("BarrierTimeout: ") in calls
        assert "rank      : 0 (local_rank: 0)" in done.stderr
        assert said in done.stderr
