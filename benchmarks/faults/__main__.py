"""Injects faults and prints a table of what went wrong: the goal is zero everywhere.

A run has a seed. It writes each finished case to a results file; a second start with
the same seed goes on after the last one. Repeat one case with --case.
"""

import argparse
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import forking_environment  # noqa: F401 - before torch

from faults import harm, plan
from faults.results import ResultsFile, faults_in, summary, table
from faults.runner import Runner
from tracedstore.tools.demo.store_servers import serve_store


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-faults", description=__doc__)
    parser.add_argument(
        "--faults", type=int, default=10_000, help="number of faults (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed (default: 1)")
    parser.add_argument(
        "--only",
        choices=[*plan.classes(), *harm.classes()],
        default="",
        help="inject one class of faults",
    )
    parser.add_argument(
        "--signals", type=int, default=300, help="signals a combination (default: 300)"
    )
    parser.add_argument(
        "--exits", type=int, default=10, help="exits a combination (default: 10)"
    )
    parser.add_argument(
        "--builds", type=int, default=100, help="damaged builds (default: 100)"
    )
    parser.add_argument(
        "--pairs", type=int, default=200, help="pairs of jobs (default: 200)"
    )
    parser.add_argument(
        "--match", default="", help="of signals and exits: cases with this text only"
    )
    parser.add_argument("--case", type=int, help="run one case and print its records")
    parser.add_argument(
        "--jobs", type=int, default=12, help="cases at the same time (default: 12)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bench-results/faults.jsonl"),
        help="results file (default: bench-results/faults.jsonl)",
    )
    return parser.parse_args()


def main() -> int:
    """Run the cases that have no result yet; return 1 if one of them is not good."""
    options = _options()
    # Ranks are stopped and killed between Store calls of the Python base.
    os.environ["TRACEDSTORE_CORE"] = "python"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"{threads} threads run in the process that forks the ranks, not 1")
    file = ResultsFile(options.results, options.seed, options.only)
    if options.only in harm.classes():
        return harm.run(options, file)
    single = options.case is not None
    done = {} if single else file.read()
    # Collected once here, and not by every rank at its end.
    gc.collect()
    gc.freeze()
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    # Not TemporaryDirectory, which every rank would remove at its exit.
    folder = Path(tempfile.mkdtemp(prefix="tracedstore-faults-", dir=shared))
    try:
        with serve_store("etcd-v2", folder) as etcd_port:
            runner = Runner(options, folder, int(etcd_port), file, done)
            broken = runner.run_one(options.case) if single else runner.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = sorted(done.values(), key=lambda result: result["number"])
    if not single:
        print(table(results))
        print(summary(results))
        print(f"{sum(map(faults_in, results))} faults in {len(results)} cases")
    bad = [result for result in results if any(result["findings"].values())]
    return 1 if bad or broken or not results else 0


if __name__ == "__main__":
    sys.exit(main())
