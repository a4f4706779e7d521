"""Cases that show whether tracing harms a job: signals, exits, builds and records.

Every case runs bare as well, as the reference. A case is a row of results of one
combination, and not one fault.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from faults import endings, pairs, signal_child
from faults.endings import COLUMNS
from faults.processes import Channel, Process
from faults.results import Result, ResultsFile, faults_in, markdown

# Seconds without an answer after which a child is in a deadlock.
_ANSWER_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Combination:
    """What one child does."""

    base: str
    setting: str
    loop: str
    handler: str

    def __str__(self) -> str:
        return f"{self.base} {self.setting}, {self.loop}, handler: {self.handler}"


def combinations() -> list[Combination]:
    """Return what is tried with signals, each bare and on both bases."""
    return [
        Combination(base, setting, loop, handler)
        for loop in signal_child.LOOPS
        for handler in signal_child.HANDLERS
        for base in signal_child.BASES
        for setting in signal_child.SETTINGS
        if base != "bare" or setting == "default"
    ]


def signal_case(number: int, seed: int, what: Combination, signals: int) -> Result:
    """Signal one child, and return what it counted."""
    draw = random.Random(f"signals/{seed}/{number}")

    def work(channel: Channel) -> None:
        signal_child.Child(
            what.base, what.setting, what.loop, what.handler, signals, channel
        ).run()

    began = time.monotonic()
    child = Process(work)
    sent = 0
    findings: dict[str, list[str]] = {column: [] for column in COLUMNS}
    counts: dict[str, Any] = {}
    try:
        child.wait_for("ready", _ANSWER_TIMEOUT)
        for _ in range(signals):
            sent += 1
            signal_child.wait_before_signal(what.loop, draw.uniform)
            child.signal(draw.choice((signal.SIGTERM, signal.SIGUSR1)))
            child.wait_for("settled", _ANSWER_TIMEOUT)
        counts = child.wait_for("result", _ANSWER_TIMEOUT)
    except TimeoutError:
        if child.exit_status is None:
            findings["deadlocks"].append(f"no answer to signal {sent}")
        else:
            findings["aborts"].append(f"exit status {child.exit_status}")
    finally:
        child.kill()
        child.close()
    for column in ("lost", "doubled"):
        findings[column] = ["exception"] * int(counts.get(column, 0))
    if counts and (not counts["recording"] or counts["failures"]):
        findings["recording off"].append(
            f"recording {counts['recording']}, {counts['failures']:g} failures"
        )
    if counts.get("failed children"):
        findings["wrong ends"] += ["forked child"] * int(counts["failed children"])
    return {
        "number": number,
        "class": "signals",
        "base": what.base,
        "row": f"{what.loop}, {what.setting}",
        "compared": f"{what.loop}, {what.handler}",
        "text": str(what),
        "seconds": round(time.monotonic() - began, 2),
        "faults": sent,
        "findings": findings,
        "counts": counts,
        "errors": [line["text"] for line in child.lines if "text" in line][:5],
    }


def signals(options: argparse.Namespace, done: dict[int, Result]) -> Iterator[Result]:
    """Run the combinations that have no result yet."""
    for number, what in enumerate(combinations()):
        if number not in done and options.match in str(what):
            yield signal_case(number, options.seed, what, options.signals)


Runs = Callable[[argparse.Namespace, dict[int, Result]], Iterator[Result]]
# The cases of each class, in order.
RUNS: dict[str, Runs] = {
    "signals": signals,
    "exits": endings.exits,
    "builds": endings.builds,
    "records": endings.records,
    "pairs": pairs.run,
}


def classes() -> list[str]:
    """Return the names of the classes."""
    return list(RUNS)


def run(options: argparse.Namespace, file: ResultsFile) -> int:
    """Run a class, print its table, and return 1 if tracing does harm."""
    done = file.read()
    for result in RUNS[options.only](options, dict(done)):
        done[result["number"]] = result
        file.append(result)
        for column, found in result["findings"].items():
            if found and result.get("base") != "bare":
                print(f"{column.upper()} {len(found)}: {found[0]} ({result['text']})")
        sys.stdout.flush()
    results = sorted(done.values(), key=lambda result: result["number"])
    print(pairs.table(results) if options.only == "pairs" else table(results))
    return int(not results or bool(harm_in(results)))


def harm_in(results: list[Result]) -> list[Result]:
    """Return the results with a finding that the bare reference has not."""
    reference = {
        (r["compared"], column)
        for r in results
        if r.get("base") == "bare"
        for column, found in r["findings"].items()
        if found
    }
    return [
        result
        for result in results
        if result.get("base") != "bare"
        and any(
            found and (result.get("compared"), column) not in reference
            for column, found in result["findings"].items()
        )
    ]


def table(results: list[Result]) -> str:
    """Return a row for each base and what it did; bare is the reference."""
    rows = [["class", "case", "base", "cases", "faults", *COLUMNS]]
    kinds = {(r["class"], r["row"], r["base"]) for r in results}
    for kind in sorted(kinds):
        chosen = [r for r in results if (r["class"], r["row"], r["base"]) == kind]
        rows.append(
            [
                *kind,
                str(len(chosen)),
                str(sum(map(faults_in, chosen))),
                *(
                    str(sum(len(r["findings"][column]) for r in chosen))
                    for column in COLUMNS
                ),
            ]
        )
    return markdown(rows)
