"""The lines that the demo prints."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tracedstore import names
from tracedstore.common.ranges import fold
from tracedstore.tools.demo import summary as findings
from tracedstore.tools.demo.outputs import Event
from tracedstore.tools.terminal import Line, Screen

_HEADING, _RESULT, _WARNING, _ERROR = "bold", "green", "yellow", "red"
_TIME_WIDTH = len("  0.0 s  ")


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
