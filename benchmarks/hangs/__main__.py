"""Makes random hangs and prints how many were named right, wrong, or not at all."""

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hangs.runner import Outcome, make_case, run_case
from hangs.scenarios import SCENARIOS


def main() -> int:
    """Run the hangs; return 1 if a rank was named wrongly or not at all."""
    parser = argparse.ArgumentParser(prog="make bench-hangs ARGS=...")
    parser.add_argument("--hangs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first hang")
    parser.add_argument("--max-world-size", type=int, default=16)
    parser.add_argument("--only", choices=sorted(SCENARIOS), default="")
    arguments = parser.parse_args()
    outcomes = []
    for number in range(arguments.first, arguments.first + arguments.hangs):
        case = make_case(
            arguments.seed,
            number,
            max_world_size=arguments.max_world_size,
            name=arguments.only,
        )
        outcome = run_case(case)
        outcomes.append(outcome)
        _print_outcome(outcome, arguments.seed)
    return _print_summary(outcomes)


def _print_outcome(outcome: Outcome, seed: int) -> None:
    seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
    print(
        f"{outcome.case.number:4} {outcome.case}: {outcome.result}{seconds},"
        f" {outcome.reporters} reporters, {outcome.with_note} of"
        f" {outcome.survivors} exceptions with a note {outcome.why}",
        flush=True,
    )
    if outcome.result != "right":
        print(
            f"     repeat: make bench-hangs ARGS='--seed {seed} --first"
            f" {outcome.case.number} --hangs 1'"
        )


def _print_summary(outcomes: list[Outcome]) -> int:
    counts = Counter(outcome.result for outcome in outcomes)
    seconds = sorted(o.seconds for o in outcomes if o.seconds is not None)
    print(
        f"{len(outcomes)} hangs: {counts['right']} named right, {counts['wrong']}"
        f" wrong, {counts['not named']} not named"
    )
    if seconds:
        print(
            f"time to the name: median {statistics.median(seconds):.1f} s,"
            f" longest {seconds[-1]:.1f} s"
        )
    return 0 if counts["right"] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
