"""Makes random hangs; prints how many were named right, partly, wrong, or not at all.

A case depends on the seed and its number alone. A case that is not right prints the one
command that repeats it.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import get_args

import forking_environment  # noqa: F401 - before torch

from hangs.cases import make_case
from hangs.nodes import missing
from hangs.oracle import Outcome, Result
from hangs.runner import end_with_parent, run_case
from hangs.scenarios import SCENARIOS
from tracedstore.tools.demo.store_servers import serve_store


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-hangs", description=__doc__)
    parser.add_argument(
        "--hangs", type=int, default=300, help="number of cases (default: 300)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed (default: 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first hang")
    parser.add_argument(
        "--jobs", type=int, default=4, help="hangs at the same time (default: 4)"
    )
    parser.add_argument(
        "--max-world-size", type=int, default=16, help="most ranks (default: 16)"
    )
    parser.add_argument(
        "--only", choices=sorted(SCENARIOS), default="", help="one scenario"
    )
    parser.add_argument(
        "--events", action="store_true", help="print the events and exceptions"
    )
    parser.add_argument("--results", type=Path, help="file for results as JSON")
    return parser.parse_args()


def main() -> int:
    """Run the hangs; return 1 if a rank was named wrongly or not at all."""
    options = _options()
    cases = [
        make_case(
            options.seed,
            number,
            max_world_size=options.max_world_size,
            name=options.only,
        )
        for number in range(options.first, options.first + options.hangs)
    ]
    if why := missing():
        print(f"no two nodes: {why}; these cases are left out")
        cases = [case for case in cases if not case.scenario.nodes]
    outcomes = []
    # Every case has a process of its own, whose program may set tracedstore up. They
    # are forked from one without threads that has imported torch.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["hangs.runner"])
    with (
        tempfile.TemporaryDirectory(prefix="hangs-") as folder,
        serve_store("etcd-v2", Path(folder)) as port,
        processes.Pool(options.jobs, end_with_parent, maxtasksperchild=1) as pool,
    ):
        run = partial(run_case, etcd_port=int(port))
        for outcome in pool.imap_unordered(run, cases):
            outcomes.append(outcome)
            _print_outcome(outcome, options)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(outcome.to_json()) + "\n")
    return _print_summary(outcomes)


def _print_outcome(outcome: Outcome, options: argparse.Namespace) -> None:
    seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
    why = f": {outcome.why}" if outcome.why else ""
    print(
        f"{outcome.case.number:4} {outcome.case}: {outcome.result}{seconds},"
        f" {outcome.reporters} reporters, {outcome.with_note} of"
        f" {len(outcome.errors)} exceptions with a note{why}",
        flush=True,
    )
    if outcome.result != "right":
        only = f" --only {options.only}" if options.only else ""
        print(
            f"     repeat: make bench-hangs ARGS='--seed {options.seed} --first"
            f" {outcome.case.number} --hangs 1 --max-world-size"
            f" {options.max_world_size}{only} --events'"
        )
    if options.events:
        for event in outcome.events:
            print("    ", event)
        for seat, error in outcome.errors.items():
            print("    ", seat, error)


def _print_summary(outcomes: list[Outcome]) -> int:
    for name, harmless in (("hangs", False), ("healthy jobs", True)):
        some = [one for one in outcomes if one.case.scenario.harmless == harmless]
        counts = Counter(outcome.result for outcome in some)
        results = ("right", "wrong") if harmless else get_args(Result)
        print(f"{len(some)} {name}: " + ", ".join(f"{counts[r]} {r}" for r in results))
    errors = sum(len(outcome.errors) for outcome in outcomes)
    notes = sum(outcome.with_note for outcome in outcomes)
    print(f"{notes} of {errors} exceptions with a note")
    if seconds := sorted(o.seconds for o in outcomes if o.seconds is not None):
        print(
            f"time to the name: median {statistics.median(seconds):.1f} s,"
            f" longest {seconds[-1]:.1f} s"
        )
    print(f"load average: {os.getloadavg()[1]:.0f}")
    return 0 if all(outcome.result == "right" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
