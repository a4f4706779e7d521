"""The demo, scenario by scenario."""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import CommandError
from tracedstore.common.identity import ProcessIdentity
from tracedstore.common.ranges import fold
from tracedstore.tools.demo.outputs import Event, RankOutputs
from tracedstore.tools.demo.rank import OutputFolder, RankProcesses
from tracedstore.tools.demo.store_servers import serve_store, store_url
from tracedstore.tools.terminal import Line, Screen

SCENARIOS = 6
# Seconds between two polls of the ranks, whose pages change twice a second.
_POLL_INTERVAL = 0.5
# Seconds that a scenario may take.
_SCENARIO_TIMEOUT = 60.0
# Seconds after which others do not take what a failed call of a rank waited for as what
# it does now; and after which they would not if the rank had ended.
_OUTLIVED_AFTER, _FORGOTTEN_AFTER = 7.0, 16.0
# Seconds for the event that a stall has ended.
_RESUME_TIMEOUT = 5.0
_HEALTHY_STEPS = range(1, 13)
_LATE_STEPS = range(13, 16)
_LATE_SECONDS = 1.8
_TRAINING_STEPS = 4
# The collective that one rank leaves out.
SKIPPED = "all_reduce"
_STORES = {
    "tcp": "a TCPStore",
    "file": "a FileStore",
    "etcd": "an EtcdV3Store",
    "etcd-v2": "an EtcdStore",
}
_MAX_LAST_RANKS = 4
_HEADING, _RESULT, _WARNING, _ERROR = "bold", "green", "yellow", "red"
_TIME_WIDTH = len("  0.0 s  ")


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
    ranks = RankProcesses(arguments.ranks, arguments.seed, folder)
    with (
        ranks,
        serve_store(arguments.store, folder.path) as location,
        ranks,
        printer.screen,
    ):
        scenarios = _Scenarios(arguments, folder, ranks, printer)
        url = store_url(arguments.store, location)
        summary = scenarios.run(location, lambda: announce(store=url))
        if arguments.serve:
            summary["serving"] = {"sd": scenarios.sd_url, "store": url}
        (folder.path / "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n", "utf-8"
        )
        printer.summary(summary)
        if arguments.json:
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
            sys.stdout.flush()
        if arguments.serve:
            printer.serving(len(ranks.living), **summary["serving"])
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


def _pause_until_interrupt(printer: "Printer") -> None:
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        # Ends the line with the ^C that a terminal shows.
        printer.paragraph("")


class _Scenarios:
    """Commands the ranks, and prints what their outputs show."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        folder: OutputFolder,
        ranks: RankProcesses,
        printer: "Printer",
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._ranks = ranks
        self._printer = printer
        self._outputs = RankOutputs(folder, ranks.living)
        self._next_poll = 0.0
        self._title = "starting"
        self._failed_at = 0.0
        chosen = random.Random(arguments.seed)  # noqa: S311 - no secret
        others = chosen.sample(range(1, arguments.ranks), 2)
        self._straggler, self._victims = others[0], sorted([0, others[1]])
        self._busy = chosen.randrange(arguments.ranks)
        self._skipping = chosen.randrange(arguments.ranks)

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
            " Everything below is read from the ranks' logs, traces, metrics and"
            " endpoints."
        )
        self._ranks.send("join", kind=given.store, location=location)
        self._wait()
        joined()
        self._healthy_steps()
        skipped = self._skipped_call()
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
            "seconds": round(self._printer.seconds(), 1),
            **outputs.totals(),
            "slowest_waits": outputs.slowest_waits(),
            "straggler": straggler,
            "busy": self._busy,
            "skipping": self._skipping,
            "skipped": skipped,
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
        before = self._outputs.totals()
        self._ranks.send(
            "steps",
            first=_HEALTHY_STEPS.start,
            count=len(_HEALTHY_STEPS),
            seconds=0.2,
            warn_after=5.0,
        )
        self._wait()
        after = self._outputs.totals()
        failed = sum(after["failed_calls"].values())
        completed = [
            total["barrier_calls"].get("completed", 0) // self._arguments.ranks
            for total in (before, after)
        ]
        self._printer.result(
            f"{after['calls'] - before['calls']:,} calls, {failed} failed;"
            f" {completed[1] - completed[0]} barriers, all completed"
        )

    def _skipped_call(self) -> dict[str, Any]:
        self._begin(
            2,
            "a skipped collective",
            f"One rank leaves out an {SKIPPED} that all others call. Which one?",
        )
        self._ranks.send("train", steps=_TRAINING_STEPS, skipping_rank=self._skipping)
        self._wait()
        self._failed_at = time.monotonic()
        find = partial(self._outputs.find_stall, f"{SKIPPED} ", resumes=False)
        skipped = self._agreed(find)
        self._print_stall(
            skipped, self._skipping, "mismatch", "; the call timed out on all ranks"
        )
        return skipped

    def _contention(self) -> None:
        self._begin(3, "contention", "All ranks update one key by compare-and-set.")
        before = self._outputs.totals()
        self._ranks.send("contend", seconds=2.5)
        self._wait()
        after = self._outputs.totals()
        won, lost = (after[name] - before[name] for name in ("cas_won", "cas_lost"))
        self._printer.result(
            f"{won + lost:,} compare-and-sets: {won:,} won, {lost:,} lost to another"
            f" writer ({lost / max(1, won + lost):.0%})"
        )

    def _late_rank(self) -> dict[str, Any]:
        self._begin(
            4, "a straggler", "One rank arrives late at every barrier. Which one?"
        )
        self._wait_until(self._failed_at + _OUTLIVED_AFTER)
        self._ranks.send(
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
        late = self._outputs.find_straggler(prefixes)
        self._printer.result(
            f"rank {late['rank']} on {late['host']} was last {late['times']} times of"
            f" {late['of']}, {late['late_seconds']:.2f} s behind the others"
        )
        return late

    def _busy_rank(self) -> dict[str, Any]:
        self._begin(
            5,
            "a busy rank",
            "All ranks but one call torch's new_group. What is that rank doing?",
        )
        self._ranks.send("create_group", busy_rank=self._busy)
        self._wait(self._end_load_after_verdict)
        stalled = self._agreed(self._outputs.find_stall)
        self._print_stall(stalled, self._busy, "busy", "; all ranks went on")
        return stalled

    def _agreed(self, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what the ranks report of a stall, when they agree."""
        until = time.monotonic() + _RESUME_TIMEOUT
        while not (stalled := find())["agree"]:
            if time.monotonic() > until:
                raise CommandError(
                    "the ranks do not report one stall and its end: this machine is too"
                    f" busy, or this is a bug; report it with {self._folder.path}"
                )
            self._tick()
        return stalled

    def _print_stall(
        self, stalled: dict[str, Any], rank: int, cause: str, more: str = ""
    ) -> None:
        correct = stalled["ranks"] == [rank] and stalled["cause"] == cause
        reporters = stalled["reported_by"]
        self._printer.result(
            f"log of rank{'s' * (len(reporters) > 1)} {fold(reporters)} names rank"
            f" {fold(stalled['ranks'])}, {stalled['cause']}:"
            f" {'correct' if correct else 'wrong'}{more}"
        )

    def _end_load_after_verdict(self) -> None:
        self._tick()
        if self._outputs.find_stall()["reported_by"]:
            self._ranks.end_load(self._busy)

    def _killed_ranks(self) -> dict[str, Any]:
        self._begin(
            6,
            "two ranks die",
            "Two processes get SIGKILL before a checkpoint. Which ranks are they?",
        )
        self._wait_until(self._failed_at + _FORGOTTEN_AFTER)
        # Before the command is sent: however busy the machine is, they do not arrive.
        self._ranks.kill(self._victims)
        self._printer.note("two processes killed; the other ranks do not know it yet")
        self._ranks.send("checkpoint", seconds=0.5, timeout=6.0, warn_after=1.5)
        self._wait()
        missing = self._outputs.find_missing()
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
        self._ranks.wait(self._title, _SCENARIO_TIMEOUT, meanwhile or self._tick)
        until = time.monotonic() + _POLL_INTERVAL + 0.1
        while time.monotonic() < until:
            self._tick()
        self._poll(scrape_all=True)

    def _wait_until(self, moment: float) -> None:
        while time.monotonic() < moment:
            self._tick()

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
        return self._outputs.url_of(self._ranks.living[0], "/sd")


class Printer:
    """Prints the course of the demo.

    Args:
        announce: Is called with the scenario, and with each note.
        quiet: Print nothing.
    """

    def __init__(self, announce: Callable[..., None], *, quiet: bool) -> None:
        self.screen = Screen(sys.stdout, quiet=quiet)
        self._announce = announce
        self._started = time.monotonic()
        # Events of the current scenario that are printed, with their barrier or phase.
        self._printed: set[tuple[str, str]] = set()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    def paragraph(self, text: str) -> None:
        """Print text at the left edge."""
        self.screen.print(Line(text))

    def scenario(self, heading: str, question: str) -> None:
        """Print the heading of a scenario."""
        self._printed.clear()
        self.screen.print(Line(""), Line(heading, _HEADING), Line(question))
        self._announce(scenario=heading, question=question)

    def note(self, text: str, style: str = "", more: str = "") -> None:
        """Print text with the time, and more text in the next line."""
        lines = [f"{self.seconds():5.1f} s  {text}"]
        if more:
            lines.append(f"{'':{_TIME_WIDTH}}{more}")
        for line in lines:
            self.screen.print(Line(line, style, indent=_TIME_WIDTH))
        self._announce(note=f"{text} {more}".strip(), style=style)

    def result(self, text: str) -> None:
        """Print the result of a scenario, with the time."""
        self.note(text, _RESULT)

    def events(self, events: list[Event], *, ranks_wait: bool) -> None:
        """Print the warnings of ranks, the first of each kind per barrier or phase.

        A stall at a barrier is not printed: the barrier's own warning names its ranks.

        Args:
            events: The events.
            ranks_wait: Ranks wait at a barrier now.
        """
        for event in events:
            phase: str = event.get("phase", "")
            key: tuple[str, str] = event["event"], event.get("barrier", phase)
            if key in self._printed or phase.startswith("barrier "):
                continue
            self._printed.add(key)
            rank = event.get("rank")
            if event["event"] == names.BARRIER_WAITING:
                # The event is not current if its ranks have arrived since.
                waiting = event["arrived_count"] if ranks_wait else 0
                self.note(
                    f"rank {rank} warns, {event['waited_seconds']:.1f} s into"
                    f" {event['barrier']}"
                    + (f", while {waiting} ranks wait:" if waiting else ":"),
                    _WARNING,
                    event["missing"],
                )
            elif event["event"] == names.CAS_CONTENDED:
                self.note(
                    f"rank {rank} warns: {event['losses_in_a_row']} lost in a row on"
                    f" {event['key']}",
                    _WARNING,
                )
            elif event["event"] == names.JOB_STALLED:
                self.note(
                    f"rank {rank} reports, {event['waited_seconds']:.1f} s into"
                    f" {event['phase']}, while {event['waiting_count']} ranks wait:",
                    _WARNING,
                    f"{event['event']}: {event['awaited']}",
                )
            elif event["event"] == names.JOB_RESUMED:
                self.note(f"rank {rank} reports {event['event']}")
            elif event["event"] == names.BARRIER_TIMEOUT:
                self.note(
                    f"rank {rank} times out after {event['waited_seconds']:.1f} s:"
                    f" missing ranks {fold(event['missing_ranks'])}",
                    _ERROR,
                )

    def summary(self, summary: dict[str, Any]) -> None:
        """Print the summary, the files and further commands."""
        text = "the demo has ended: look around; q prints its lines and summary"
        self._announce(note=text, style=_RESULT)
        files = summary["files"]
        self._table(
            f"Summary of {summary['seconds']:.0f} seconds", 13, _summary_rows(summary)
        )
        self._table(
            f"Files in {files['folder']}",
            28,
            [
                (files["logs"], "events, one JSON object a line"),
                (files["traces"], "spans, one JSON object a line"),
                (files["metrics"], "the last scrape of each rank"),
                (
                    files["metrics_while_waiting"],
                    "the last scrape while ranks were missing",
                ),
                (files["exceptions"], "the exception of each survivor"),
                ("summary.json", "this summary"),
            ],
        )
        self._table(
            "Next, with DIR for that folder",
            47,
            [
                (
                    "tracedstore report DIR/logs --traces DIR/traces",
                    "this run as a page",
                ),
                ("tracedstore-run torchrun ... train.py", "your own job, unchanged"),
                ("tracedstore dashboards export monitoring/", "dashboards and alerts"),
                ("tracedstore demo --top", "the demo on the screen of top"),
                ("tracedstore demo --serve", "endpoints for a Prometheus"),
                ("tracedstore demo --store etcd", "another store; also file"),
            ],
        )

    def _table(self, heading: str, width: int, rows: list[tuple[str, str]]) -> None:
        """Print rows with labels of one width; a heading is never broken."""
        self.screen.print(Line(""), Line(heading, _HEADING, indent=None))
        for label, text in rows:
            self.screen.print(Line(f"  {label:{width}}  {text}", indent=width + 4))

    def serving(self, survivors: int, sd: str, store: str) -> None:
        """Print how Prometheus and other commands reach the survivors."""
        heading = f"{survivors} survivors serve until Ctrl-C. For a Prometheus:"
        self.screen.print(
            Line(""),
            Line(heading, _HEADING),
            Line("  scrape_configs:"),
            Line("    - job_name: tracedstore-demo"),
            Line("      http_sd_configs:"),
            Line(f"        - url: {sd}", indent=None),
            Line("From the store, in another terminal:", _HEADING),
            Line(f"  tracedstore status --store {store}", indent=None),
            Line(f"  tracedstore sd --store {store}", indent=None),
        )


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as labels and texts."""
    failed = ", ".join(f"{n:,} {kind}" for kind, n in summary["failed_calls"].items())
    cas, lost = summary["cas_won"] + summary["cas_lost"], summary["cas_lost"]
    ordered = sorted(summary["last_arrivals"].items(), key=lambda item: -item[1])
    last = [f"rank {rank}: {n}x" for rank, n in ordered[:_MAX_LAST_RANKS]]
    if others := sum(n for _, n in ordered[_MAX_LAST_RANKS:]):
        last.append(f"others: {others}x")
    gone, late = summary["missing"], summary["straggler"]
    stall, skip = summary["stalled"], summary["skipped"]
    awaited = f"rank {fold(stall['ranks'])}, {stall['cause']}"
    waits = [
        f"{wait['seconds']:.2f} s  {wait['what']}, by rank {wait['rank']}"
        + (", timed out" if wait["result"] == "timeout" else "")
        for wait in summary["slowest_waits"]
    ]
    delay = f"{late['late_seconds']:.2f} s late, {late['times']} times of {late['of']}"
    return [
        ("calls", f"{summary['calls']:,}, failed: {failed or 'none'}"),
        ("CAS", f"{cas:,} made, {lost:,} lost to another writer"),
        *zip(["slowest waits", *[""] * len(waits)], waits, strict=False),
        ("arrived last", ", ".join(last)),
        ("straggler", f"rank {late['rank']} on {late['host']}, {delay}"),
        (
            "awaited",
            f"{awaited}, in {stall['phase']} by ranks {stall['waiting_ranks']}",
        ),
        (
            "skipped",
            f"{skip['phase']}, by rank {fold(skip['ranks'])}",
        ),
        ("missing", f"ranks {fold(gone['ranks'])} on {', '.join(set(gone['hosts']))}"),
        ("", f"by log, exception, metric and trace of {len(gone['survivors'])} ranks"),
    ]
