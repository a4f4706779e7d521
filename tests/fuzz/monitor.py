"""Starts workers, ends those that hang, and reports what they found."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fuzz import worker
from fuzz.progress import Counts, Progress

# Seconds without a finished input, after which a worker hangs.
_HANG_TIMEOUT = 600.0
# Seconds until the first input. Importing torch on a busy machine takes most of it.
_START_TIMEOUT = 1800.0
_POLL_INTERVAL = 0.1
# Bytes of resident memory of a worker. torch takes 400 MB of them.
_MAX_RSS = 3 << 30
_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one engine on one target.

    Attributes:
        target: The name of the target.
        engine: The engine.
        inputs: The number of inputs.
        seed: The seed of the engine.
    """

    target: str
    engine: str
    inputs: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run.

    Attributes:
        run: The run.
        counts: Its counts.
        seconds: Its duration.
        failure: Why it failed; "" if it did not.
        failing_input: The file with the input that failed; None without one.
    """

    run: Run
    counts: Counts
    seconds: float
    failure: str = ""
    failing_input: Path | None = None


def execute(
    run: Run,
    results: Path,
    max_growth: int,
    *,
    table: str = worker.TABLE,
    hang_timeout: float = _HANG_TIMEOUT,
) -> Result:
    """Run a worker to its end, and keep the input of a failure in `results`."""
    folder = results / f"{run.target}-{run.engine}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    progress = Progress(folder / worker.PROGRESS)
    started = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*_command(run, folder), "--table", table],
            stdout=output,
            stderr=subprocess.STDOUT,
            # Strings hash the same in every run.
            env=os.environ | {"PYTHONPATH": _python_path(), "PYTHONHASHSEED": "0"},
        )
        try:
            killed = _wait(process, progress, hang_timeout)
        finally:
            process.kill()
            process.wait()
    counts = progress.counts()
    failure = killed or _failure(process.returncode, folder)
    growth = counts.last_rss - counts.early_rss
    if not failure and counts.inputs < run.inputs:
        failure = f"ended after {counts.inputs} of {run.inputs} inputs"
    grown = not failure and growth > max_growth
    if grown:
        failure = f"{growth >> 20} MB more memory after three quarters of the inputs"
    failing_input = None
    # Without any input the worker could not start; growth has no single input.
    if failure and not grown and progress.input():
        failing_input = _keep_input(run, folder, progress, results)
    return Result(
        run=run,
        counts=counts,
        seconds=time.monotonic() - started,
        failure=failure,
        failing_input=failing_input,
    )


def _command(run: Run, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "fuzz.worker", "--target", run.target),
        *("--engine", run.engine, "--inputs", str(run.inputs)),
        *("--seed", str(run.seed), "--folder", str(folder)),
    ]


def _python_path() -> str:
    return os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def _wait(
    process: "subprocess.Popen[bytes]", progress: Progress, hang_timeout: float
) -> str:
    """Wait for a worker; return why it was ended, "" if it ended by itself."""
    seen, since = (-1, False), time.monotonic()
    while process.poll() is None:
        started = bool(progress.input())
        current = progress.counts().inputs, started
        timeout = hang_timeout if started else _START_TIMEOUT
        if current != seen:
            seen, since = current, time.monotonic()
        elif time.monotonic() - since > timeout:
            return f"hangs: no result within {timeout:g} s"
        if _rss(process.pid) > _MAX_RSS:
            return f"more than {_MAX_RSS >> 20} MB of memory"
        time.sleep(_POLL_INTERVAL)
    return ""


def _rss(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):  # it has just ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _failure(code: int, folder: Path) -> str:
    reason = folder / worker.FAILURE
    if reason.exists():
        return reason.read_text().strip().splitlines()[-1]
    return f"exit code {code}: see {folder}/output.txt" if code else ""


def _keep_input(run: Run, folder: Path, progress: Progress, results: Path) -> Path:
    saved = folder / worker.FAILING_INPUT
    data = saved.read_bytes() if saved.exists() else progress.input()
    digest = hashlib.sha256(data).hexdigest()[:12]
    path = results / f"{run.target}-{digest}"
    path.write_bytes(data)
    return path
