"""Make a page of many ranks' logs: who was missing, who is late, what failed.

Reads the JSON lines that tracedstore logs, out of files with anything else in
them, after the job is dead. The page is one HTML file that loads nothing.

LOG is a file, plain or gzip, a folder with all files below it, a pipe, or - for
standard input. Lines may be as they were printed, or as torchrun, Docker,
Kubernetes, Loki or journald wraps them. Times of barriers that completed are
there where the application has configured structlog; or give their spans with
--traces, in JSON as OpenTelemetry's ConsoleSpanExporter or a collector's file
exporter (OTLP) writes them.

Examples:
  tracedstore report logs/ --output report.html
  tracedstore report rank*.log node7.log.gz --traces spans.jsonl
  kubectl logs -l job=train --tail=-1 | tracedstore report -

Exit codes: 0 written, 1 there is nothing to read or the page cannot be written,
64 the command line makes no sense, 130 Ctrl-C
"""

import argparse
import sys
from pathlib import Path

from tracedstore.core.errors import CommandError
from tracedstore.report.analysis import analysed
from tracedstore.report.formatting import number, plural
from tracedstore.report.page import page
from tracedstore.report.reader import (
    STANDARD_INPUT,
    OutputError,
    ReadStats,
    files_in,
    read_events,
)
from tracedstore.report.records import Facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    parser.set_defaults(refuse=parser.error)
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
    places = [*arguments.logs, *arguments.traces]
    if places.count(STANDARD_INPUT) > 1:
        arguments.refuse(
            "- is given twice: standard input can be read once, as logs or as traces"
        )
    _check(output)
    facts, stats = _read(places, output)
    analysis = analysed(facts)
    try:
        # A key may have halves of surrogates in it, which no encoding has.
        output.write_bytes(page(analysis, stats).encode("utf-8", "replace"))
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None
    said = [
        plural(len(analysis.ranks), "rank"),
        plural(len(analysis.rounds), "barrier"),
        plural(len(analysis.incidents), "incident"),
    ]
    read = [
        plural(stats.events, "event"),
        plural(stats.spans, "barrier span"),
        f"{number(stats.foreign)} of others",
        f"{number(stats.useless)} damaged",
    ]
    sys.stdout.write(
        f"{output}: {', '.join(said)}\n"
        f"{plural(stats.lines, 'line')} read: {', '.join(read)}\n"
    )
    if arguments.traces and not stats.spans:
        sys.stderr.write(
            "tracedstore: no span of a barrier could be read: --traces takes them as"
            " JSON, as ConsoleSpanExporter or a collector's file exporter writes them\n"
        )
    for damaged in stats.damaged[:10]:
        sys.stderr.write(f"tracedstore: not read to its end: {damaged}\n")
    return 0


def _check(output: Path) -> None:
    """Complain before hours of logs are read."""
    try:
        if output.is_dir():
            raise CommandError(
                f"{output} is a folder: name a file in it, as --output"
                f" {output / 'report.html'}"
            )
        if not output.parent.is_dir():
            raise CommandError(
                f"{output} cannot be written: there is no folder {output.parent}; make"
                " it, or name another --output"
            )
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None


def _read(places: list[str], output: Path) -> tuple[Facts, ReadStats]:
    facts, stats = Facts(), ReadStats()
    try:
        found = files_in(places, output)
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}"
        ) from None
    except OutputError:
        raise CommandError(
            f"{output} is one of the logs, and would be written over: name another"
            " --output"
        ) from None
    if not found:
        raise CommandError(
            f"no file is in {' or '.join(places)}: name the ranks' logs, or a folder"
            " that has them"
        )
    read_events(found, facts.add, stats, _tell_of_waiting)
    if not facts.events:
        raise CommandError(_nothing(found, stats))
    return facts, stats


def _nothing(found: list[str], stats: ReadStats) -> str:
    if stats.damaged and not stats.lines:
        return f"cannot be read: {stats.damaged[0]}"
    where = found[0] if len(found) == 1 else plural(len(found), "file")
    if not stats.lines:
        return f"{where}: nothing is written there; name the ranks' logs"
    why = f"; {stats.damaged[0]}" if stats.damaged else ""
    return (
        f"none of {plural(stats.lines, 'line')} in {where} is an event that can be"
        f" read{why}: logs have to be JSON lines (TRACEDSTORE_LOG_FORMAT=json), not"
        " those for people; spans, JSON as ConsoleSpanExporter or a collector's file"
        " exporter writes them"
    )


def _tell_of_waiting(name: str) -> None:
    shown = "standard input" if name == STANDARD_INPUT else name
    sys.stderr.write(f"tracedstore: waiting for {shown}, in which nothing is yet\n")
    sys.stderr.flush()
