"""``tracedstore report`` of real jobs of torchrun that crash."""

import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import HANG
from support.pages import Page
from support.tools import ROOT
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.processes

DUMPED = (
    "The job was waiting in all_reduce 2 of group 0 (default_pg) for rank 1: alive, the"
    " last that it called is all_reduce 1 [1] Float at children/crashing_rank.py:"
)
CHILD = ROOT / "tests/integration/children/crashing_rank.py"


def run_job(folder: Path, crash: str) -> None:
    """Run a job of two ranks that ends in a way, with its logs in a folder."""
    logs = folder / "logs"
    logs.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--redirects", "3", "--tee", "3"]
    torchrun += ["--log-dir", str(logs), str(CHILD), crash]
    with (logs / "torchrun.log").open("wb") as log:
        done = subprocess.run(
            torchrun,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "",
                "OMP_NUM_THREADS": "1",
                "TORCH_FR_DUMP_TEMP_FILE": str(logs / "comm_lib_trace_rank_"),
            },
            timeout=HANG,
            check=False,
        )
    assert done.returncode == 1


class TestCrash:
    """The headlines in docs/report.md are those of real jobs."""

    @pytest.mark.parametrize(
        ("crash", "headline", "detail"),
        [
            (
                "raise",
                "Rank 1 on localhost failed: KeyError: 'labels'",
                "In load, crashing_rank.py:",
            ),
            ("kill", "Rank 1 on localhost ended with SIGKILL", "(dmesg)"),
            (
                "wait",
                "Rank 0 on localhost timed out: RuntimeError: Timed out waiting 5000ms",
                "No failure of rank 1 is logged.",
            ),
            (
                "dump",
                DUMPED,
                "Rank 0 called it at children/crashing_rank.py:",
            ),
        ],
    )
    def test_headline(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        crash: str,
        headline: str,
        detail: str,
    ) -> None:
        """The cause is the headline, also if a victim of it failed first."""
        run_job(tmp_path, crash)
        output = tmp_path / "report.html"

        assert main(["report", str(tmp_path / "logs"), "--output", str(output)]) == 0

        printed = capsys.readouterr().out
        shown = Page(output.read_text("utf-8"))
        assert shown.texts["headline"].startswith(headline)
        assert detail in shown.texts["lead"]
        assert printed.startswith(headline)
        stalls = 1 if crash == "dump" else 0
        counts = f"2 ranks, 0 barriers, {stalls} incident{'s' * (1 - stalls)}, 2 failed"
        assert counts in printed
        page = (ROOT / "docs/report.md").read_text("utf-8")
        assert f"\n{headline}" in page
