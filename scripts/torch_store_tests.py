"""Run PyTorch's own test_store.py on traced stores, and compare with bare ones.

    scripts/torch_store_tests.py PYTORCH

PYTORCH is a checkout of PyTorch, of about the version that is installed: the tests are
not in its wheel. They import expecttest, which torch does not install either.

Every store that the tests create is wrapped ("outer"), or wrapped and put below a
PrefixStore ("inner"), by both bases. The same is done with bare stores. Exits with 1 if
a test fails that passes with bare stores, and is not known to.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PLACES = ("outer", "inner")
BASES = ("bare", "python", "native")
# The Python base keeps a store until it is closed.
KNOWN = {("python", "FileStoreTest::test_refcount")}
# Seconds for all tests of one combination.
_TIMEOUT = 1200


def _substitute(base: str, place: str) -> None:
    """Replace torch's classes of stores by ones whose instances are placed so."""
    import torch.distributed as dist  # noqa: PLC0415 - of the child process
    import torch.testing._internal.common_distributed  # noqa: F401, PLC0415

    import tracedstore  # noqa: PLC0415

    prefix_store = dist.PrefixStore

    def placed(store: Any) -> Any:
        if base != "bare":
            store = tracedstore.wrap(store)
        return prefix_store("placed", store) if place == "inner" else store

    def substitute(original: Any) -> type:
        class Substitute(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return placed(original(*args, **kwargs))

            def __instancecheck__(cls, instance: Any) -> bool:
                traced = getattr(instance, "_traced", None)
                return isinstance(traced.inner if traced else instance, original)

        return Substitute(original.__name__, (), {})

    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("torch.distributed", "torch.testing"))
    ]
    for name in ("TCPStore", "FileStore", "HashStore"):
        original = getattr(dist, name)
        replacement = substitute(original)
        for module in modules:
            if vars(module).get(name) is original:
                setattr(module, name, replacement)


def _run_one(tests: Path, base: str, place: str, results: Path) -> None:
    """Run the tests with one combination, in this process."""
    import pytest  # noqa: PLC0415 - of the child process

    _substitute(base, place)
    options = ["-q", "-c", os.devnull, "--rootdir", str(tests.parent)]
    pytest.main([*options, "--timeout", "120", f"--junitxml={results}", str(tests)])


def _outcomes(tests: Path, base: str, place: str) -> dict[str, str]:
    """Run the tests in a process of their own; return the outcome of each."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        subprocess.run(  # noqa: S603 - this script
            [sys.executable, __file__, str(tests), "--one", base, place, str(results)],
            check=False,
            env=os.environ
            | {
                "TRACEDSTORE_CORE": "auto" if base == "bare" else base,
                "TRACEDSTORE_LOG_FORMAT": "off",
            },
            stdout=subprocess.DEVNULL,
            timeout=_TIMEOUT,
        )
        cases = ET.parse(results).iter("testcase")  # noqa: S314 - pytest wrote it
        return {
            f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": (
                {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(
                    next((child.tag for child in case), ""), "passed"
                )
            )
            for case in cases
        }


def main() -> int:
    """Run all combinations, and print what differs from the bare stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pytorch", type=Path, help="a checkout of PyTorch")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        base, place, results = options.one
        _run_one(options.pytorch, base, place, Path(results))
        return 0
    tests = options.pytorch.resolve() / "test" / "distributed" / "test_store.py"
    worse = 0
    for place in PLACES:
        bare: dict[str, str] = {}
        for base in BASES:
            outcomes = _outcomes(tests, base, place)
            bare = bare or outcomes
            counts = Counter(outcomes.values())
            shown = ", ".join(
                f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")
            )
            print(f"{place} {base}: {shown}")
            for test, outcome in outcomes.items():
                if outcome != bare.get(test):
                    print(f"  {test}: {outcome}, bare {bare.get(test)}")
                    worse += outcome == "failed" and (base, test) not in KNOWN
    return min(worse, 1)


if __name__ == "__main__":
    sys.exit(main())
