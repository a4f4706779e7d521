"""The demo, scenario by scenario."""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracedstore._version import __version__
from tracedstore.common.errors import CommandError
from tracedstore.common.identity import ProcessIdentity
from tracedstore.common.ranges import fold
from tracedstore.tools.demo import summary as findings
from tracedstore.tools.demo.output_folder import OutputFolder
from tracedstore.tools.demo.outputs import RankOutputs
from tracedstore.tools.demo.printer import Printer
from tracedstore.tools.demo.processes import Fleet
from tracedstore.tools.demo.rank import simulated_host
from tracedstore.tools.demo.store_servers import serve_store, store_url

SCENARIOS = 5
# Seconds between two polls of the ranks, whose pages change twice a second.
_POLL_INTERVAL = 0.5
# Seconds that a scenario may take.
_SCENARIO_TIMEOUT = 60.0
# Seconds for the event that a stall has ended.
_RESUME_TIMEOUT = 5.0
_HEALTHY_STEPS = range(1, 13)
_LATE_STEPS = range(13, 16)
_LATE_SECONDS = 1.8
_STORES = {
    "tcp": "a TCPStore",
    "file": "a FileStore",
    "etcd": "an EtcdV3Store",
    "etcd-v2": "an EtcdStore",
}


def run_demo(
    arguments: argparse.Namespace, announce: Callable[..., None] = lambda **_: None
) -> int:
    """Run all scenarios and return the exit code.

    Args:
        arguments: The command line.
        announce: Is called with the store's URL, and with what is printed.

    Raises:
        CommandError: The demo cannot run here, or its ranks disagree.
    """
    folder = _make_folder(arguments.output)
    printer = Printer(announce, quiet=arguments.json)
    # The ranks are forked before the store has threads, and end before it does.
    fleet = Fleet(arguments.ranks, arguments.seed, folder)
    with (
        fleet,
        serve_store(arguments.store, folder.path) as location,
        fleet,
        printer.screen,
    ):
        demo = _Demo(arguments, folder, fleet, printer)
        url = store_url(arguments.store, location)
        summary = demo.run(location, lambda: announce(store=url))
        if arguments.serve:
            summary["serving"] = {"sd": demo.sd_url, "store": url}
        (folder.path / "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n", "utf-8"
        )
        printer.summary(summary)
        if arguments.json:
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
            sys.stdout.flush()
        if arguments.serve:
            printer.serving(len(fleet.living), **summary["serving"])
        if arguments.serve or arguments.top:
            _pause_until_interrupt(printer)
    return 0


def _make_folder(output: Path | None) -> OutputFolder:
    try:
        if output is None:
            return OutputFolder(Path(tempfile.mkdtemp(prefix="tracedstore-demo-")))
        if output.is_dir() and any(output.iterdir()):
            raise CommandError(
                f"--output {output} is not empty; name an empty or a new folder"
            )
        return OutputFolder(output.resolve())
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be written: {error.strerror}"
        ) from None


def _pause_until_interrupt(printer: Printer) -> None:
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        # Ends the line with the ^C that a terminal shows.
        printer.paragraph("")


class _Demo:
    """Commands the ranks, and prints what their outputs show."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        folder: OutputFolder,
        fleet: Fleet,
        printer: Printer,
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._fleet = fleet
        self._printer = printer
        self._outputs = RankOutputs(folder, fleet.living)
        self._next_poll = 0.0
        self._title = "starting"
        chosen = random.Random(arguments.seed)  # noqa: S311 - no secret
        others = chosen.sample(range(1, arguments.ranks), 2)
        self._straggler, self._victims = others[0], sorted([0, others[1]])
        self._busy = chosen.randrange(arguments.ranks)

    def run(self, location: str, joined: Callable[[], None]) -> dict[str, Any]:
        """Run all scenarios and return the summary.

        Args:
            location: The location of the store.
            joined: Is called when all ranks use the store.
        """
        given = self._arguments
        self._printer.paragraph(
            f"{given.ranks} ranks, real processes on"
            f" {ProcessIdentity().host}, share {_STORES[given.store]}."
            f" Hosts are simulated: {simulated_host(0)} to"
            f" {simulated_host(given.ranks - 1)}, two ranks each. Everything below is"
            " read from the ranks' logs, traces, metrics and endpoints."
        )
        self._fleet.send("join", kind=given.store, location=location)
        self._wait()
        joined()
        self._healthy_steps()
        self._contention()
        straggler = self._late_rank()
        stalled = self._busy_rank()
        missing = self._killed_ranks()
        outputs = self._outputs
        return {
            "version": __version__,
            "store": given.store,
            "ranks": given.ranks,
            "seed": given.seed,
            "simulated_hosts": True,
            "seconds": round(self._printer.seconds(), 1),
            **findings.totals(outputs),
            "slowest_waits": findings.slowest_waits(outputs.spans),
            "straggler": straggler,
            "busy": self._busy,
            "stalled": stalled,
            "killed": self._victims,
            "missing": missing,
            "files": {
                "folder": str(self._folder.path),
                "logs": "logs/rank-*.jsonl",
                "traces": "traces/rank-*.jsonl",
                "metrics": "metrics/rank-*.prom",
                "metrics_while_waiting": "metrics/waiting/rank-*.prom",
                "exceptions": "errors/rank-*.json",
            },
        }

    def _healthy_steps(self) -> None:
        self._begin(
            1,
            "healthy steps",
            "In each step every rank writes a key, reads one and waits for all ranks.",
        )
        before = findings.totals(self._outputs)
        self._fleet.send(
            "steps",
            first=_HEALTHY_STEPS.start,
            count=len(_HEALTHY_STEPS),
            seconds=0.2,
            warn_after=5.0,
        )
        self._wait()
        after = findings.totals(self._outputs)
        failed = sum(after["failed_calls"].values())
        completed = [
            total["barrier_calls"].get("completed", 0) // self._arguments.ranks
            for total in (before, after)
        ]
        self._printer.result(
            f"{after['calls'] - before['calls']:,} calls, {failed} failed;"
            f" {completed[1] - completed[0]} barriers, all completed"
        )

    def _contention(self) -> None:
        self._begin(2, "contention", "All ranks update one key by compare-and-set.")
        before = findings.totals(self._outputs)
        self._fleet.send("contend", seconds=2.5)
        self._wait()
        after = findings.totals(self._outputs)
        won, lost = (after[name] - before[name] for name in ("cas_won", "cas_lost"))
        self._printer.result(
            f"{won + lost:,} compare-and-sets: {won:,} won, {lost:,} lost to another"
            f" writer ({lost / max(1, won + lost):.0%})"
        )

    def _late_rank(self) -> dict[str, Any]:
        self._begin(
            3, "a straggler", "One rank arrives late at every barrier. Which one?"
        )
        self._fleet.send(
            "steps",
            first=_LATE_STEPS.start,
            count=len(_LATE_STEPS),
            seconds=0.2,
            warn_after=1.0,
            late_rank=self._straggler,
            late=_LATE_SECONDS,
        )
        self._wait()
        prefixes = [f"step/{step}" for step in _LATE_STEPS]
        late = findings.straggler(self._outputs, prefixes)
        self._printer.result(
            f"rank {late['rank']} on {late['host']} was last {late['times']} times of"
            f" {late['of']}, {late['late_seconds']:.2f} s behind the others"
        )
        return late

    def _busy_rank(self) -> dict[str, Any]:
        self._begin(
            4,
            "a busy rank",
            "All ranks but one call torch's new_group. What is that rank doing?",
        )
        self._fleet.send("create_group", busy_rank=self._busy)
        self._wait(self._end_load_after_verdict)
        until = time.monotonic() + _RESUME_TIMEOUT
        while not (stalled := findings.stalled(self._outputs))["agree"]:
            if time.monotonic() > until:
                raise CommandError(
                    "the ranks do not report one stall and its end: this machine is too"
                    f" busy, or this is a bug; report it with {self._folder.path}"
                )
            self._tick()
        correct = stalled["ranks"] == [self._busy] and stalled["cause"] == "busy"
        reporters = stalled["reported_by"]
        self._printer.result(
            f"log of rank{'s' * (len(reporters) > 1)} {fold(reporters)} names rank"
            f" {fold(stalled['ranks'])}, {stalled['cause']}:"
            f" {'correct' if correct else 'wrong'}; all ranks went on"
        )
        return stalled

    def _end_load_after_verdict(self) -> None:
        self._tick()
        if findings.stalled(self._outputs)["reported_by"]:
            self._fleet.end_load(self._busy)

    def _killed_ranks(self) -> dict[str, Any]:
        self._begin(
            5,
            "two ranks die",
            "Two processes get SIGKILL before a checkpoint. Which ranks are they?",
        )
        # Before the command is sent: however busy the machine is, they do not arrive.
        self._fleet.kill(self._victims)
        self._printer.note("two processes killed; the other ranks do not know it yet")
        self._fleet.send("checkpoint", seconds=0.5, timeout=6.0, warn_after=1.5)
        self._wait()
        missing = findings.missing(self._outputs, self._folder)
        if not missing["agree"]:
            raise CommandError(
                "the ranks disagree about the missing ranks: this machine is too busy,"
                f" or this is a bug; report it with {self._folder.path}"
            )
        verdict = "correct" if missing["ranks"] == self._victims else "wrong"
        self._printer.result(
            f"log, exception, metric and trace of {len(missing['survivors'])} survivors"
            f" name ranks {fold(missing['ranks'])}: {verdict}"
        )
        return missing

    def _begin(self, number: int, title: str, question: str) -> None:
        self._title = title
        self._printer.scenario(f"Scenario {number} of {SCENARIOS}: {title}", question)

    def _wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until the ranks have finished, and their pages are current."""
        self._fleet.wait(self._title, _SCENARIO_TIMEOUT, meanwhile or self._tick)
        until = time.monotonic() + _POLL_INTERVAL + 0.1
        while time.monotonic() < until:
            self._tick()
        self._poll(scrape_all=True)

    def _tick(self) -> None:
        time.sleep(0.05)
        if (began := time.monotonic()) >= self._next_poll:
            self._poll()
            # Polling many ranks takes long. It gets half of the time at most.
            ended = time.monotonic()
            self._next_poll = ended + max(_POLL_INTERVAL, ended - began)

    def _poll(self, *, scrape_all: bool = False) -> None:
        events = self._outputs.poll(scrape_all=scrape_all)
        self._printer.events(events, ranks_wait=self._ranks_wait())

    def _ranks_wait(self) -> bool:
        statuses = [status for status in self._outputs.statuses.values() if status]
        return any(
            call.operation == "wait" for status in statuses for call in status.in_flight
        )

    @property
    def sd_url(self) -> str:
        """The service discovery page of a survivor, for Prometheus."""
        return self._outputs.url_of(self._fleet.living[0], "/sd")
