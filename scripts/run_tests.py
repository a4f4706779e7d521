"""Runs all tests: the exclusive ones one at a time, then the others in parallel.

The failures of a few test modules are run once more, alone. Tests wait for real
processes, and beside three other workers on two cores a deadline may pass that is met
otherwise. The summary names them: a test that is often there is to be mended.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
_MAX_MODULES = 5
# pytest's exit codes.
_PASSED, _TESTS_FAILED = 0, 1


def main() -> int:
    """Run the tests; return 0 if each passed, at the second time at the latest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="4", help="pytest workers (default: 4)")
    workers = parser.parse_args().workers
    _FAILED.unlink(missing_ok=True)  # of an earlier run
    codes = {
        _pytest("-m", "exclusive"),
        # More workers than cores, because most tests wait for other processes.
        _pytest(
            *("-m", "not exclusive and not frameworks"),
            *("--numprocesses", workers, "--dist", "worksteal"),
        ),
    }
    if codes == {_PASSED}:
        return 0
    # Whatever else pytest returns, it has not run all tests.
    return _repeat() if codes <= {_PASSED, _TESTS_FAILED} else 1


def _repeat() -> int:
    failed = sorted(json.loads(_FAILED.read_text()))
    # A server that does not start fails all tests of its module.
    modules = {test.partition("::")[0] for test in failed}
    if len(modules) > _MAX_MODULES:
        print(f"{len(modules)} modules failed; up to {_MAX_MODULES} are run once more")
        return 1
    code = _pytest("--last-failed", "--last-failed-no-failures", "none")
    word = "passed" if code == _PASSED else "were run"
    print(f"failed beside other tests, and {word} alone:", *failed, sep="\n  ")
    return 0 if code == _PASSED else 1


def _pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - no input from outside


if __name__ == "__main__":
    sys.exit(main())
