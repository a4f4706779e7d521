"""Make one page of the logs of many ranks: who was missing, who is late, what failed.

Reads the JSON lines that tracedstore logs, out of files with anything else in them,
after the job is dead. The page is one HTML file that loads nothing.

LOG is a file, plain or gzip, a folder with all files below it, or - for standard
input; as it was printed, or as Docker, Kubernetes, Loki or journald wraps it. Times of barriers that completed are there where the application has configured
structlog; or give their spans with --traces, in JSON as OpenTelemetry's
ConsoleSpanExporter or a collector's file exporter (OTLP) writes them.

Examples:
  tracedstore report logs/ --output report.html
  tracedstore report rank*.log node7.log.gz --traces spans.jsonl
  kubectl logs -l job=train --tail=-1 | tracedstore report -

Exit codes: 0 written, 1 nothing to read or cannot be written
"""

import argparse
import sys
from pathlib import Path

from tracedstore.cli.errors import CommandError
from tracedstore.report.analysis import analysed
from tracedstore.report.facts import Facts
from tracedstore.report.page import page
from tracedstore.report.reading import Tally, events_in, files_in
from tracedstore.report.words import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="file, folder, or -")
    parser.add_argument(
        "--traces",
        action="append",
        default=[],
        metavar="FILE",
        help="spans as JSON; may be given more than once",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where to write the page (report.html)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read everything, and write the page."""
    output: Path = arguments.output
    if output.is_dir() or not output.parent.is_dir():
        raise CommandError(f"{output} cannot be written: name a file in a folder")
    facts, tally = _read([*arguments.logs, *arguments.traces], output)
    analysis = analysed(facts)
    try:
        # A key may have halves of surrogates in it, which no encoding has.
        output.write_bytes(page(analysis, tally).encode("utf-8", "replace"))
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None
    said = [
        plural(len(analysis.ranks), "rank"),
        plural(len(analysis.rounds), "barrier"),
        plural(len(analysis.incidents), "incident"),
        f"{plural(tally.lines, 'line')} read, {tally.skipped} of them skipped",
    ]
    sys.stdout.write(f"{output}: {', '.join(said)}\n")
    if arguments.traces and not tally.spans:
        sys.stderr.write(
            "tracedstore: no span of a barrier could be read: --traces takes them as"
            " JSON, as ConsoleSpanExporter or a collector's file exporter writes them\n"
        )
    for damaged in tally.damaged[:10]:
        sys.stderr.write(f"tracedstore: not read to its end: {damaged}\n")
    return 0


def _read(places: list[str], output: Path) -> tuple[Facts, Tally]:
    facts, tally = Facts(), Tally()
    try:
        found = files_in(places, output)
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}"
        ) from None
    for event in events_in(found, tally):
        if not facts.add(event):
            tally.unfit += 1
    if not facts.events:
        why = f"; {tally.damaged[0]}" if tally.damaged else ""
        raise CommandError(
            f"none of {plural(tally.lines, 'line')} in"
            f" {plural(tally.files, 'file')} is an event that can be read{why}: logs"
            " have to be JSON lines (TRACEDSTORE_LOG_FORMAT=json), not those for"
            " people"
        )
    return facts, tally
