"""A slice of the fault suite: no finding in any column."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# Of 200 faults, on a busy machine.
pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.timeout(1800)]


def inject(results: Path, faults: int) -> subprocess.CompletedProcess[str]:
    """Run the suite with two cases at the same time."""
    return subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "faults"),
            *("--faults", str(faults), "--seed", "20", "--jobs", "2"),
            *("--results", str(results)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.parametrize("faults", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_survivors_are_right(faults: int, tmp_path: Path) -> None:
    """Right verdicts in time, no abort and no lost count."""
    results = tmp_path / "faults.jsonl"

    run = inject(results, faults)

    assert run.returncode == 0, run.stdout + run.stderr
    cases = len(results.read_text().splitlines())
    assert f"in {cases} cases" in run.stdout

    # A second start has nothing to do.
    run = inject(results, faults)

    assert run.returncode == 0, run.stdout + run.stderr
    assert len(results.read_text().splitlines()) == cases


@pytest.mark.parametrize(
    ("fault_class", "options", "rows"),
    [
        ("signals", ("--signals", "1", "--match", "handler: exception"), 35),
        ("exits", ("--exits", "1", "--match", "wait local fresh"), 3),
        pytest.param(
            *("signals", ("--signals", "5", "--match", "handler: exception"), 35),
            marks=pytest.mark.soak,
        ),
        pytest.param("builds", ("--builds", "2"), 2, marks=pytest.mark.soak),
        pytest.param("records", (), 3, marks=pytest.mark.soak),
    ],
)
def test_harm(
    tmp_path: Path, fault_class: str, options: tuple[str, ...], rows: int
) -> None:
    """A few cases of the classes that compare with bare: no finding."""
    results = tmp_path / "harm.jsonl"

    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "faults"),
            *("--only", fault_class, "--results", str(results), *options),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert len(results.read_text().splitlines()) == rows
