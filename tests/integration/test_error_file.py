"""A BarrierTimeout in the error file of a torchrun worker."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.fork_server import python_path

pytestmark = pytest.mark.processes


class TestErrorFile:
    """Schedulers show torchelastic's error file for a failed job."""

    def test_has_missing_ranks(self, tmp_path: Path) -> None:
        """The file and torchrun's summary have the missing rank and its host."""
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
                "PYTHONPATH": python_path(),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert done.returncode == 1, done.stderr
        message = json.loads(error_file.read_text("utf-8"))["message"]
        text = message["message"]
        assert text.startswith(
            "BarrierTimeout: Timed out waiting on barrier on rank 0, for key prefix:"
            " checkpoint/7 (world_size=2, missing_ranks=[1 on "
        )
        assert text.endswith(
            f"timeout=1.0): missing 1 of 2: {socket.gethostname()} (rank 1)"
        )
        # No "During handling of the above exception" with the store's exception.
        calls = message["extraInfo"]["py_callstack"]
        assert calls.count("Traceback") == 1
        assert text.removeprefix("BarrierTimeout: ") in calls
        assert "rank      : 0 (local_rank: 0)" in done.stderr
        assert text in done.stderr
