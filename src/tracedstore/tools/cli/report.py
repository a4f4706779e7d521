"""Create a page from the logs of all ranks: crashes, missing ranks, stragglers.

Reads the JSON lines that tracedstore logs, and what a job prints: tracebacks,
torchrun's report, NCCL's watchdog, and lines of the kernel (dmesg -T). The
dumps of torch's Flight Recorder are read too. The page is one HTML file that
loads nothing. The job may have ended or hang.

LOG is a file, plain or gzip, a directory, which is read recursively, a pipe, or
- for standard input. The name of a dump ends with its rank; LOG may be what is
before that, as in TORCH_FR_DUMP_TEMP_FILE. Lines may be wrapped by torchrun,
Docker, Kubernetes, Loki or journald. The times of completed barriers are in the
logs if the application has configured structlog. Else pass spans with --traces,
in the JSON of OpenTelemetry's ConsoleSpanExporter or of a collector's file
exporter (OTLP).

Examples:
  tracedstore report logs/ --output report.html
  tracedstore report rank*.log node7.log.gz --traces spans.jsonl
  tracedstore report logs/ ~/.cache/torch/comm_lib_trace_rank_
  kubectl logs -l job=train --tail=-1 | tracedstore report -

Exit codes: 0 the page is written, 1 nothing of a job could be read or the page
cannot be written, 64 invalid command line, 130 Ctrl-C
"""

import argparse
import sys
from pathlib import Path

from tracedstore.common.errors import CommandError
from tracedstore.common.text import number, plural, printable
from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.headline import headline
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.log_reader import (
    STANDARD_INPUT,
    OutputError,
    ReadStats,
    find_files,
    read_events,
)
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.page import page

_MAX_FILE_ERRORS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(refuse=parser.error)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="file, directory, or -")
    parser.add_argument(
        "--traces",
        action="append",
        default=[],
        metavar="FILE",
        help="file with spans as JSON; may be repeated",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="file to write the page to (default: report.html)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read all logs, write the page, and return the exit code."""
    output: Path = arguments.output
    paths = [*arguments.logs, *arguments.traces]
    if paths.count(STANDARD_INPUT) > 1:
        arguments.refuse(
            "- is given twice: standard input can be read once, as logs or as traces"
        )
    _check_output(output)
    analysis, stats = read_logs(paths, output)
    try:
        # "replace", because UTF-8 cannot encode lone surrogates.
        output.write_bytes(page(analysis, stats).encode("utf-8", "replace"))
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None
    failed = sum(len(each.processes) for each in analysis.ended)
    summary = [
        plural(len(analysis.ranks), "rank"),
        plural(len(analysis.barriers), "barrier"),
        plural(analysis.incident_count, "incident"),
        plural(failed, "failed process", "es"),
    ]
    found = headline(analysis)
    lines = [
        plural(stats.events, "event"),
        plural(stats.spans, "barrier span"),
        f"{number(stats.unrelated)} unrelated",
        f"{number(stats.damaged)} damaged",
    ]
    if stats.dumps:
        lines.append(plural(stats.dumps, "dump"))
    sys.stdout.write(
        f"{printable(found.text)}\n"
        f"{output}: {', '.join(summary)}\n"
        f"{plural(stats.lines, 'line')} read: {', '.join(lines)}\n"
    )
    if arguments.traces and not stats.spans:
        sys.stderr.write(
            "tracedstore: no barrier span could be read: --traces requires the JSON of"
            " ConsoleSpanExporter or of a collector's file exporter\n"
        )
    for file in stats.incomplete_files[:_MAX_FILE_ERRORS]:
        sys.stderr.write(f"tracedstore: not read to the end: {file}\n")
    return 0


def _check_output(output: Path) -> None:
    """Fail before the logs are read, which may take minutes."""
    try:
        if output.is_dir():
            raise CommandError(
                f"{output} is a directory: name a file in it, such as --output"
                f" {output / 'report.html'}"
            )
        if not output.parent.is_dir():
            raise CommandError(
                f"{output} cannot be written: there is no directory {output.parent};"
                " create it, or name another --output"
            )
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None


def read_logs(paths: list[str], output: Path) -> tuple[Analysis, ReadStats]:
    """Read and analyse all logs.

    Raises:
        CommandError: There is no file or nothing of a job, or the output is one of the
            logs.
    """
    records, printed, stats = LoggedEvents(), JobOutput(), ReadStats()
    try:
        files = find_files(paths, output)
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}"
        ) from None
    except OutputError:
        raise CommandError(
            f"{output} is one of the logs, and would be overwritten: name another"
            " --output"
        ) from None
    if not files:
        raise CommandError(
            f"no file in {' or '.join(paths)}: name the logs of the ranks, or a"
            " directory that contains them"
        )
    read_events(files, records.add, stats, _report_wait, printed)
    if not records.event_counts and not printed.of_job:
        raise CommandError(_no_event_message(files, stats))
    return analyse(records, printed), stats


def _no_event_message(files: list[str], stats: ReadStats) -> str:
    if stats.incomplete_files and not stats.lines:
        return f"cannot be read: {stats.incomplete_files[0]}"
    where = files[0] if len(files) == 1 else plural(len(files), "file")
    if not stats.lines:
        return f"{where}: empty; name the logs of the ranks"
    reason = f"; {stats.incomplete_files[0]}" if stats.incomplete_files else ""
    return (
        f"no event in the {plural(stats.lines, 'line')} of {where}{reason}: logs have"
        " to be JSON lines (TRACEDSTORE_LOG_FORMAT=json), not console output; spans"
        " have to be the JSON of ConsoleSpanExporter or of a collector's file exporter."
        " If the job hangs now and has printed nothing, run tracedstore status if it is"
        " traced, else py-spy dump"
    )


def _report_wait(name: str) -> None:
    shown = "standard input" if name == STANDARD_INPUT else name
    sys.stderr.write(f"tracedstore: waiting for {shown}, which has no data yet\n")
    sys.stderr.flush()
