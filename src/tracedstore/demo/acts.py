"""The demo, act by act."""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.coordination.ranges import fold
from tracedstore.core.errors import CommandError
from tracedstore.core.identity import ProcessIdentity
from tracedstore.demo import rank_states
from tracedstore.demo import summary as findings
from tracedstore.demo.fleet import Fleet
from tracedstore.demo.outputs import Event, Signals
from tracedstore.demo.rank import Folder, simulated_host
from tracedstore.demo.screen import Screen, is_live
from tracedstore.demo.store_servers import address, served

# How long the start and each act take, about.
_SECONDS = (1.0, 3.0, 3.0, 6.5, 8.0)
_ACTS = len(_SECONDS) - 1
# Seconds between two looks at the ranks; their pages change twice a second.
_POLL = 0.5
# Seconds that an act may take before something is wrong.
_PATIENCE = 60.0
_HEALTHY = range(1, 13)
_LATE = range(13, 16)
_LATE_SECONDS = 1.8
_STORES = {"tcp": "a TCPStore", "file": "a FileStore", "etcd": "an EtcdStore"}


def perform(arguments: argparse.Namespace) -> int:
    """Show all of it; give the exit code."""
    folder = _folder(arguments.output)
    stream = None if arguments.json else sys.stdout
    live = stream is not None and is_live(stream)
    # The ranks first, before the store has threads; and they end before it does.
    fleet = Fleet(arguments.ranks, arguments.seed, folder)
    with (
        fleet,
        served(arguments.store, folder.path) as where,
        fleet,
        Screen(stream, live=live) as screen,
    ):
        show = _Show(arguments, folder, fleet, screen)
        summary = show.acts(where)
        if arguments.serve:
            summary["serving"] = {
                "sd": show.sd,
                "store": address(arguments.store, where),
            }
        (folder.path / "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n", "utf-8"
        )
        show.end(summary)
        if arguments.json:
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
            sys.stdout.flush()
        if arguments.serve:
            show.serve(**summary["serving"])
    return 0


def _folder(wanted: Path | None) -> Folder:
    try:
        if wanted is None:
            return Folder(Path(tempfile.mkdtemp(prefix="tracedstore-demo-")))
        if wanted.is_dir() and any(wanted.iterdir()):
            raise CommandError(
                f"--output {wanted} is not empty; give a folder that is, or a new one"
            )
        return Folder(wanted.resolve())
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be written: {error.strerror}"
        ) from None


class _Show:
    """Tells the ranks what to do, and shows what they tell."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        folder: Folder,
        fleet: Fleet,
        screen: Screen,
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._fleet = fleet
        self._screen = screen
        self._signals = Signals(folder, fleet.living)
        self._started = time.monotonic()
        self._next_look = 0.0
        self._act = (0, "starting", 0.0)
        # What was told in this act, and of which barrier.
        self._told: set[tuple[str, str | None]] = set()
        chosen = random.Random(arguments.seed)  # noqa: S311 - for the show
        others = chosen.sample(range(1, arguments.ranks), 2)
        self._straggler, self._victims = others[0], sorted([0, others[1]])

    def acts(self, where: str) -> dict[str, Any]:
        """Play them all; give the summary."""
        given = self._arguments
        self._screen.say(
            f"{given.ranks} ranks, real processes on"
            f" {ProcessIdentity().host}, meet through {_STORES[given.store]}."
            f" Hosts are simulated: {simulated_host(0)} to"
            f" {simulated_host(given.ranks - 1)}, two ranks each."
            " All that follows is read from the ranks' own signals."
        )
        self._fleet.tell("join", kind=given.store, where=where)
        self._wait("starting")
        self._healthy()
        self._contention()
        late = self._late()
        missing = self._death()
        signals = self._signals
        return {
            "version": __version__,
            "store": given.store,
            "ranks": given.ranks,
            "seed": given.seed,
            "simulated_hosts": True,
            "seconds": round(self._elapsed(), 1),
            **findings.totals(signals),
            "slowest_waits": findings.slowest_waits(signals.spans),
            "straggler": late,
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

    def _healthy(self) -> None:
        self._begin(
            1, "healthy steps", "Each step, every rank writes, reads and waits for all."
        )
        before = findings.totals(self._signals)
        self._fleet.tell(
            "steps",
            first=_HEALTHY.start,
            count=len(_HEALTHY),
            seconds=0.2,
            warn_after=5.0,
        )
        self._wait("healthy steps")
        after = findings.totals(self._signals)
        failed = sum(after["failed_calls"].values())
        done = [
            found["barrier_visits"].get("completed", 0) // self._arguments.ranks
            for found in (before, after)
        ]
        self._say(
            f"{after['calls'] - before['calls']:,} calls, {failed} failed;"
            f" {done[1] - done[0]} barriers, all completed",
            "green",
        )

    def _contention(self) -> None:
        self._begin(2, "contention", "All ranks want the same key, by compare-and-set.")
        before = findings.totals(self._signals)
        self._fleet.tell("contend", seconds=2.5)
        self._wait("contention")
        after = findings.totals(self._signals)
        won, lost = (after[name] - before[name] for name in ("cas_won", "cas_lost"))
        self._say(
            f"{won + lost:,} compare-and-sets: {won:,} won, {lost:,} lost to another"
            f" writer ({lost / max(1, won + lost):.0%})",
            "green",
        )

    def _late(self) -> dict[str, Any]:
        self._begin(3, "a straggler", "One rank comes late to every barrier. Which?")
        self._fleet.tell(
            "steps",
            first=_LATE.start,
            count=len(_LATE),
            seconds=0.2,
            warn_after=1.0,
            late_rank=self._straggler,
            late=_LATE_SECONDS,
        )
        self._wait("a straggler")
        prefixes = [f"step/{step}" for step in _LATE]
        late = findings.straggler(self._signals, prefixes)
        self._say(
            f"rank {late['rank']} on {late['host']} was last {late['times']} times of"
            f" {late['of']}, {late['late_seconds']:.2f} s behind the others",
            "green",
        )
        return late

    def _death(self) -> dict[str, Any]:
        self._begin(
            4,
            "two ranks die",
            "On the way to a checkpoint two processes get SIGKILL. Whose are they?",
        )
        # Before the others are told to go on: however busy the machine is, these two
        # do not arrive.
        self._fleet.kill(self._victims)
        self._say("two processes killed; the others do not know it yet")
        self._fleet.tell("checkpoint", seconds=0.5, timeout=6.0, warn_after=1.5)
        self._wait("two ranks die")
        found = findings.missing(self._signals, self._folder)
        if not found["agree"]:
            raise CommandError(
                "the ranks do not agree on who is missing: either this machine is too"
                f" busy, or it is a bug to be reported with {self._folder.path}"
            )
        right = "right" if found["ranks"] == self._victims else "wrong"
        self._say(
            f"{len(found['survivors'])} survivors, one list in log, exception, metric"
            f" and trace: ranks {fold(found['ranks'])}. That is {right}.",
            "green",
        )
        return found

    def _begin(self, number: int, title: str, what: str) -> None:
        self._act = (number, title, self._elapsed())
        self._told.clear()
        self._screen.say()
        self._screen.say(f"Act {number} of {_ACTS}: {title}", "bold")
        self._screen.say(what)
        self._draw()

    def _say(self, text: str, style: str = "") -> None:
        self._screen.say(f"{self._elapsed():5.1f} s  {text}", style, indent=9)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _wait(self, what: str) -> None:
        """Wait until the ranks are through, and their pages say so."""
        self._fleet.wait(what, _PATIENCE, self._tick)
        until = time.monotonic() + _POLL + 0.1
        while time.monotonic() < until:
            self._tick()
        self._look(whole=True)

    def _tick(self) -> None:
        time.sleep(0.05)
        if (began := time.monotonic()) >= self._next_look:
            self._look()
            # Of many ranks it takes long: half of the time is theirs.
            ended = time.monotonic()
            self._next_look = ended + max(_POLL, ended - began)

    def _look(self, *, whole: bool = False) -> None:
        self._narrate(self._signals.poll(whole=whole))
        self._draw()

    def _draw(self) -> None:
        number, title, began = self._act
        # About as long as they take, so that something moves.
        part = min(1.0, (self._elapsed() - began) / _SECONDS[number])
        self._screen.show(
            rank_states.head(number, _ACTS, title, part, self._elapsed()),
            rank_states.rows(self._signals, self._screen.room),
        )

    def _narrate(self, events: list[Event]) -> None:
        for event in events:
            # The first of several that say the same.
            if (told := (event["event"], event.get("barrier"))) in self._told:
                continue
            self._told.add(told)
            rank = event.get("rank")
            if event["event"] == names.BARRIER_WAITING:
                # What the ranks said a moment ago may be of fewer.
                waiting = event["arrived_count"] if self._anybody_waits() else 0
                self._say(
                    f"rank {rank} warns, {event['waited_seconds']:.1f} s into"
                    f" {event['barrier']}"
                    + (f", while {waiting} ranks wait:" if waiting else ":"),
                    "yellow",
                )
                self._screen.say(f"{'':9}{event['missing']}", "yellow", indent=9)
            elif event["event"] == names.CAS_CONTENDED:
                self._say(
                    f"rank {rank} warns: {event['losses_in_a_row']} lost in a row on"
                    f" {event['key']}",
                    "yellow",
                )
            elif event["event"] == names.BARRIER_TIMEOUT:
                self._say(
                    f"rank {rank} gives up after {event['waited_seconds']:.1f} s:"
                    f" missing ranks {fold(event['missing_ranks'])}",
                    "red",
                )

    def _anybody_waits(self) -> bool:
        answers = [found for found in self._signals.answers.values() if found]
        return any(
            call.operation == "wait" for answer in answers for call in answer.calls
        )

    def end(self, summary: dict[str, Any]) -> None:
        """Say how it was, where everything is, and what to do now."""
        screen, files = self._screen, summary["files"]
        screen.clear()
        screen.say()
        screen.say(f"Summary of {summary['seconds']:.0f} seconds", "bold")
        for line in findings.lines(summary):
            screen.say(line, indent=17)
        screen.say()
        screen.say(f"Files in {files['folder']}", "bold")
        for path, what in (
            (files["logs"], "events, one JSON object a line"),
            (files["traces"], "spans, likewise; a barrier is one trace"),
            (files["metrics"], "what Prometheus would have scraped last"),
            (files["metrics_while_waiting"], "the same while ranks were missing"),
            (files["exceptions"], "what each survivor could catch"),
            ("summary.json", "this summary"),
        ):
            screen.say(f"  {path:28}  {what}", indent=32)
        screen.say()
        screen.say("Next, with DIR for that folder", "bold")
        for command, what in (
            ("tracedstore report DIR/logs --traces DIR/traces", "this run as a page"),
            ("tracedstore-run torchrun ... train.py", "your own job, unchanged"),
            ("tracedstore dashboards export monitoring/", "dashboards and alerts"),
            ("tracedstore demo --serve", "this for a Prometheus"),
            ("tracedstore demo --store etcd", "or file: another store"),
        ):
            screen.say(f"  {command:47}  {what}", indent=51)

    @property
    def sd(self) -> str:
        """Where a Prometheus finds the ranks."""
        return self._signals.url_of(self._fleet.living[0], "/sd")

    def serve(self, sd: str, store: str) -> None:
        """Keep the endpoints up until Ctrl-C."""
        say, living = self._screen.say, self._fleet.living
        say()
        say(f"{len(living)} survivors serve until Ctrl-C. For a Prometheus:", "bold")
        for line in (
            "scrape_configs:",
            "  - job_name: tracedstore-demo",
            "    http_sd_configs:",
            f"      - url: {sd}",
        ):
            say(f"  {line}")
        say("Or from the store, in another terminal:", "bold")
        for command in ("status", "sd"):
            say(f"  tracedstore {command} --store {store}", indent=None)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            # Below the ^C that a terminal shows.
            say()
