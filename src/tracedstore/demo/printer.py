"""The lines that the demo prints."""

import sys
import time
from typing import Any

from tracedstore import names
from tracedstore.coordination.ranges import fold
from tracedstore.demo import summary as findings
from tracedstore.demo.outputs import Event, RankOutputs
from tracedstore.demo.rank_table import Progress, live_view
from tracedstore.terminal import Line, Screen

_HEADING, _RESULT, _WARNING, _ERROR = "bold", "green", "yellow", "red"
_TIME_WIDTH = len("  0.0 s  ")


class Printer:
    """Prints the course of the demo, with its live view on a terminal.

    Args:
        quiet: Print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.screen = Screen(sys.stdout, quiet=quiet)
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

    def note(self, text: str, style: str = "") -> None:
        """Print text with the time."""
        line = f"{self.seconds():5.1f} s  {text}"
        self.screen.print(Line(line, style, indent=_TIME_WIDTH))

    def result(self, text: str) -> None:
        """Print the result of a scenario, with the time."""
        self.note(text, _RESULT)

    def view(self, progress: Progress, outputs: RankOutputs) -> None:
        """Draw the live view."""
        size = self.screen.console.size
        self.screen.show(live_view(progress, outputs, size.width, size.height))

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
                )
                text = f"{'':{_TIME_WIDTH}}{event['missing']}"
                self.screen.print(Line(text, _WARNING, indent=_TIME_WIDTH))
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
                )
                text = f"{'':{_TIME_WIDTH}}{event['event']}: {event['awaited']}"
                self.screen.print(Line(text, _WARNING, indent=_TIME_WIDTH))
            elif event["event"] == names.JOB_RESUMED:
                self.note(f"rank {rank} reports {event['event']}")
            elif event["event"] == names.BARRIER_TIMEOUT:
                self.note(
                    f"rank {rank} times out after {event['waited_seconds']:.1f} s:"
                    f" missing ranks {fold(event['missing_ranks'])}",
                    _ERROR,
                )

    def summary(self, summary: dict[str, Any]) -> None:
        """End the live view; print the summary, the files and further commands."""
        files = summary["files"]
        self.screen.clear()
        self._table(
            f"Summary of {summary['seconds']:.0f} seconds", 13, findings.table(summary)
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
