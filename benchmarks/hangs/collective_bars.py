"""Makes each hang in a collective, with few ranks and with many, and checks the bars.

Each is named right within `stall_after` and five seconds, by at most three ranks. In a
healthy job nobody is named. Some run below torchrun, by torch.multiprocessing.spawn,
and on two nodes.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import forking_environment  # noqa: F401 - before torch

from hangs.cases import LAUNCHERS, Case
from hangs.collective_scenarios import COLLECTIVES
from hangs.nodes import NODES, RANKS_PER_NODE, missing
from hangs.oracle import Outcome
from hangs.rank_process import STALL_AFTER
from hangs.runner import run_case
from hangs.scenarios import Scenario
from tracedstore.tools.attach.child_process import die_with_parent

_MAX_SECONDS: Final = STALL_AFTER + 5
_MAX_REPORTERS: Final = 3
# What each launcher runs. The launchers differ in how a rank starts, and in what it
# knows of the others, and not in the collectives.
_LAUNCHED: Final = (
    "all_reduce",
    "skips_one",
    "ddp_constructor",
    "killed",
    "busy_with_gil",
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-collectives", description=__doc__)
    parser.add_argument(
        "--ranks",
        default="2,5,16",
        help='numbers of ranks (default: 2,5,16); "" for the launchers alone',
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="hangs at the same time (default: 2)"
    )
    parser.add_argument(
        "--only", choices=sorted(COLLECTIVES), default="", help="one scenario"
    )
    parser.add_argument("--events", action="store_true", help="print the events")
    parser.add_argument("--results", type=Path, help="file for results as JSON")
    return parser.parse_args()


def make_cases(ranks: list[int], only: str = "") -> list[Case]:
    """Return each scenario with each number of ranks."""
    return [
        Case(
            number=0,
            scenario=scenario,
            kind=kind,
            world_size=world_size,
            victims=_victims(scenario, world_size),
            store=scenario.stores[0],
        )
        for scenario in COLLECTIVES.values()
        if not only or scenario.name == only
        for kind in scenario.kinds
        for world_size in sorted({max(scenario.min_world_size, one) for one in ranks})
    ]


def _victims(scenario: Scenario, world_size: int) -> tuple[int, ...]:
    last = world_size - 1
    return {0: (), 1: (last,), 2: (0, last)}[scenario.max_victims]


def make_launched_cases(only: str = "") -> list[Case]:
    """Return some scenarios below each launcher that there can be here."""
    why = missing()
    if why:
        print(f"no two nodes: {why}; these cases are left out")
    world_size = len(NODES) * RANKS_PER_NODE
    return [
        Case(
            number=0,
            scenario=COLLECTIVES[name],
            kind=COLLECTIVES[name].kinds[0],
            world_size=world_size,
            victims=_victims(COLLECTIVES[name], world_size),
            store="tcp",
            start=launcher,
        )
        for launcher in LAUNCHERS
        if not why or launcher != "two nodes"
        for name in _LAUNCHED
        if not only or name == only
    ]


def missed(outcome: Outcome) -> Iterator[str]:
    """Yield the bars that an outcome misses."""
    if outcome.result != "right":
        yield outcome.result
    if outcome.seconds is not None and outcome.seconds > _MAX_SECONDS:
        yield f"more than {_MAX_SECONDS:g} s"
    if outcome.reporters > _MAX_REPORTERS:
        yield f"more than {_MAX_REPORTERS} reporters"


def main() -> int:
    """Run the hangs; return 1 if one of them misses a bar."""
    options = _options()
    ranks = [int(one) for one in options.ranks.split(",") if one]
    cases = make_cases(ranks, options.only) + make_launched_cases(options.only)
    outcomes = []
    # Its workers fork the ranks.
    with multiprocessing.get_context("fork").Pool(
        options.jobs, die_with_parent, (os.getpid(),)
    ) as pool:
        for outcome in pool.imap_unordered(run_case, cases):
            outcomes.append(outcome)
            _print_outcome(outcome, events=options.events)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(outcome.to_json()) + "\n")
    return _print_summary(outcomes)


def _print_outcome(outcome: Outcome, *, events: bool) -> None:
    seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
    why = f"; {outcome.why}" if outcome.why else ""
    bars = "".join(f"; MISSED: {bar}" for bar in missed(outcome))
    print(
        f"{outcome.case}: {outcome.result}{seconds},"
        f" {outcome.reporters} reporters{why}{bars}",
        flush=True,
    )
    if events:
        for event in outcome.events:
            print("    ", event)
        for seat, error in outcome.errors.items():
            print("    ", seat, error)


def _print_summary(outcomes: list[Outcome]) -> int:
    hangs = [one for one in outcomes if not one.case.scenario.harmless]
    healthy = [one for one in outcomes if one.case.scenario.harmless]
    counts = Counter(one.result for one in hangs)
    accused = sum(one.result != "right" for one in healthy)
    seconds = sorted(one.seconds for one in hangs if one.seconds is not None)
    print(
        f"{len(hangs)} hangs: "
        + ", ".join(
            f"{counts[one]} {one}" for one in ("right", "partly", "wrong", "silent")
        )
        + f"; {len(healthy)} healthy jobs: {accused} accused"
    )
    if seconds:
        reporters = max(one.reporters for one in hangs)
        print(
            f"time to the name: median {statistics.median(seconds):.1f} s, longest"
            f" {seconds[-1]:.1f} s; at most {reporters} reporters"
        )
    print(f"load average: {os.getloadavg()[1]:.0f}")
    return int(any(bar for one in outcomes for bar in missed(one)))


if __name__ == "__main__":
    sys.exit(main())
