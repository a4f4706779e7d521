"""A few inputs for each fuzz target, and the fuzzers themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.engines import draw
from fuzz.monitor import Run, execute
from fuzz.table import TARGETS
from fuzz.trial import Trial

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("inputs", [20, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", TARGETS)
def test_target(name: str, inputs: int) -> None:
    """No input raises, takes seconds or takes much memory; `make fuzz` tries more."""
    target = TARGETS[name]
    trial = Trial(target, inputs)

    draw(target, max(10, int(inputs * target.share)), 1, trial)

    assert trial.counts.inputs >= 10


@pytest.mark.parametrize(
    ("target", "failure"),
    [
        ("raise", "LookupError: seven"),
        ("end", "exit code 3"),
        ("hang", "hangs: no result within 5 s"),
        ("compute", "s of CPU time"),
        ("allocate", "MB of memory"),
    ],
)
def test_failing_input(target: str, failure: str, tmp_path: Path) -> None:
    """The input of a failure is kept, however the worker ended."""
    run = Run(target=target, engine="hypothesis", inputs=400, seed=1)

    result = execute(
        run,
        tmp_path,
        1 << 30,
        table="fuzz.failing_table",
        hang_timeout=5.0 if target == "hang" else 50.0,
    )

    assert failure in result.failure
    assert result.failing_input is not None
    assert result.failing_input.read_bytes()[1:] == b"\x07"


def test_growth(tmp_path: Path) -> None:
    """Memory that grows with the number of inputs is a failure."""
    run = Run(target="grow", engine="hypothesis", inputs=1600, seed=1)

    result = execute(run, tmp_path, 32 << 20, table="fuzz.failing_table")

    assert "MB more memory" in result.failure
    assert result.failing_input is None


def test_same_inputs_again() -> None:
    """A seed repeats its inputs; another one has others."""
    drawn: list[list[bytes]] = []
    for seed in (1, 1, 2):
        drawn.append([])
        draw(TARGETS["registry_entry"], 50, seed, drawn[-1].append)

    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_repeat(tmp_path: Path) -> None:
    """An input is tried alone with one command."""
    file = tmp_path / "input"
    file.write_bytes(b"{}")

    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "--target", "ledger", "--repeat", str(file)],
        cwd=_ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ledger: 2 bytes, no failure")
