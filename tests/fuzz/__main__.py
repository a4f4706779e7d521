"""Fuzz the parsers of hostile input: ``make fuzz ARGS='--target ledger'``."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.monitor import Result, Run, execute
from fuzz.table import TARGETS
from fuzz.trial import MAX_GROWTH, Trial
from fuzz.worker import ENGINES

_INPUTS = 1_000_000
# The other inputs are Hypothesis's.
_ATHERIS_SHARE = 0.9
_RESULTS = Path("fuzz-results")


def main() -> int:
    """Run the fuzzers, or repeat one input; return 1 after a failure."""
    arguments = _parse()
    names = arguments.target or list(TARGETS)
    if arguments.repeat is not None:
        if len(names) != 1:
            raise SystemExit("--repeat needs one --target")
        data = arguments.repeat.read_bytes()
        trial = Trial(TARGETS[names[0]], 1)
        trial(data)
        slowest = trial.counts.slowest_ns / 1e9
        print(f"{names[0]}: {len(data)} bytes, no failure, {slowest:.3f} s")
        return 0
    arguments.results.mkdir(parents=True, exist_ok=True)
    runs = plan(names, arguments.engine or ENGINES, arguments.inputs, arguments.seed)
    print(_HEADING, flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        pending = [
            pool.submit(execute, run, arguments.results, MAX_GROWTH) for run in runs
        ]
        results = []
        for one in pending:
            results.append(one.result())
            print(_row(results[-1]), flush=True)
    total = sum(result.counts.inputs for result in results)
    failed = [result for result in results if result.failure]
    print(f"{total} inputs, {len(failed)} failures, seed {arguments.seed}")
    for result in failed:
        print(f"\n{result.run.target} ({result.run.engine}): {result.failure}")
        if result.failing_input is not None:
            print(
                f"  repeat it: make fuzz ARGS='--target {result.run.target}"
                f" --repeat {result.failing_input}'"
            )
    return 1 if failed else 0


def plan(
    names: Sequence[str], engines: Sequence[str], inputs: int, seed: int
) -> list[Run]:
    """Divide the inputs among the targets by their shares, and among the engines."""
    shares = {
        (name, engine): TARGETS[name].share
        * (_ATHERIS_SHARE if engine == "atheris" else 1 - _ATHERIS_SHARE)
        for name in names
        for engine in engines
    }
    whole = sum(shares.values())
    return [
        # Rounded up, so that the sum is not lower than the number asked for.
        Run(
            target=name,
            engine=engine,
            inputs=int(inputs * share / whole) + 1,
            seed=seed,
        )
        for (name, engine), share in shares.items()
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=_INPUTS, help="in all")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="workers at a time")
    parser.add_argument("--results", type=Path, default=_RESULTS, metavar="FOLDER")
    parser.add_argument(
        "--repeat", type=Path, metavar="FILE", help="try this input alone"
    )
    return parser.parse_args()


_HEADING = "target              engine        inputs  seconds  slowest  memory  growth"


def _row(result: Result) -> str:
    counts = result.counts
    growth = max(0, counts.last_rss - counts.early_rss)
    return (
        f"{result.run.target:<19} {result.run.engine:<11} {counts.inputs:>8}"
        f" {result.seconds:>8.0f} {counts.slowest_ns / 1e6:>5.0f} ms"
        f" {counts.peak_rss >> 20:>4} MB {growth >> 20:>4} MB"
        f"{'  FAILED' if result.failure else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
