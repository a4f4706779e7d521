"""Reads what a job prints besides events: tracebacks, exit codes, kernel lines, stacks.

Each line has a source: the rank or the file that it is from. A traceback has many
lines, and those of several sources may be mixed in one file.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.tools.report.failure_kinds import (
    FailureKind,
    exception_kind,
    exit_text,
)
from tracedstore.tools.report.job_output import (
    MAX_EXITS,
    MAX_SOURCES,
    JobOutput,
    OutputFailure,
    OutputSource,
    SourceLines,
    Stack,
    WorkerExit,
)
from tracedstore.tools.report.logged_events import (
    INVALID,
    NO_RANK,
    parse_timestamp,
)

# Bytes of a line that are read. torch prints exceptions of a few kilobytes.
_MAX_LINE_BYTES = 16 << 10
_MAX_TEXT_LENGTH = 400
_MAX_STACKS = 100
_MAX_FRAMES = 12
# Prefixes of one line: a time, a role of torchrun, a rank, colours.
_MAX_PREFIXES = 5
# Indented lines after which a traceback is given up.
_MAX_TRACEBACK_LINES = 5_000
_MAX_HOST_LENGTH = 100
_MAX_TIME_LENGTH = 100
_MAX_JSON_VALUES = 200
_DAY = 86_400.0

_PREFIX: Final = re.compile(
    r"\x1b\[[0-9;]{0,12}m"
    r"|\[rank(?P<rank>\d{1,7})\]: ?"
    r"|\[[A-Za-z_]\w{0,40}?(?P<local>\d{1,5})\]: ?"
    r"|\[(?P<pod>pod/[^\]\s]{1,200})\] "
    r"|\((?P<actor>\w{1,80} pid=\d{1,10})(?:, ip=[^)]{1,60})?\) "
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\s\[]{0,20} (?:stdout |stderr )?"
)
# What the text of a line may start with that belongs to no open traceback.
_NOTABLE: Final = re.compile(
    r"Traceback \(most recent|Watchdog caught|[Oo]ut of memory|OOMKilled|[Oo][Oo][Mm]"
    r"[-_ ][Kk]ill|Killed|NVRM: Xid|failed \(exitcode|closing signal|Fatal Python error"
    r"|\(most recent call first\)|Root Cause \(first|^Failures:|^  (?:time|host|rank|"
    r"exitcode|traceback) +: |^Thread (?:0x)?[0-9a-fA-F]+ \(|ChildFailedError"
)
_EXCEPTION: Final = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: ?(.*))?$")
_FRAME: Final = re.compile(
    r' *File "([^"]{1,500})", line (\d{1,9})(?:,? in (.{1,200}))?'
)
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")
_TRACEBACK: Final = "Traceback (most recent call last):"
# A span, or a line of an indented one.
_JSON_PART: Final = re.compile(
    r'\{.{0,200}"trace_id"|\s*(?:[\[\]{},]{1,10}$|"[\w.]{1,80}": )'
)
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_GOT_SIGNAL: Final = re.compile(r"got signal: (\d{1,3})$")
_WATCHDOG: Final = re.compile(
    r"Rank (\d{1,7})\] Watchdog caught collective operation timeout:"
    r" WorkNCCL\((SeqNum=\d{1,18}, OpType=\w{1,60}).{0,300}?"
    r" ran for (\d{1,15}) milliseconds"
)
_KERNEL_KILL: Final = re.compile(
    r"[Oo]ut of memory: Kill(?:ed)? process (\d{1,10}) \(([^)]{1,60})\)"
)
_OOM_EVENT: Final = re.compile(
    r"[Dd]etected \d{1,9} oom[-_ ]kill event|\bOOMKilled\b|oom[-_]kill:constraint=.*?"
    r"task=([^,]{1,60}),pid=(\d{1,10})"
)
_SHELL_KILLED: Final = re.compile(r"Killed$|.{0,200}: line \d{1,9}: +(\d{1,10}) Killed")
_XID: Final = re.compile(r"NVRM: Xid \(([^)]{1,80})\): (\d{1,4}), ?(.{0,200})")
_FATAL: Final = re.compile(r"Fatal Python error: (.{1,200})")
_EXIT: Final = re.compile(
    r"failed \(exitcode: (-?\d{1,5})\) local_rank: (\d{1,7}) \(pid: (\d{1,10})\)"
)
_CLOSING: Final = re.compile(r"Sending process (\d{1,10}) closing signal")
_BLOCK_FIELD: Final = re.compile(r"  (time|host|rank|exitcode|traceback) +: (.{0,300})")
_BLOCK_RANK: Final = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,7})\)")
_BLOCK_EXIT: Final = re.compile(r"(-?\d{1,5}) \(pid: (\d{1,10})\)")
_STACK_START: Final = re.compile(
    r"(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]{1,20} [\[(]"
)
_PY_SPY_FRAME: Final = re.compile(r"    (\S.{0,200}?) \(([^()]{1,300}):(\d{1,9})\)$")
_PATH_RANK: Final = re.compile(r"rank[_.-]?(\d{1,7})(?!\d)[^/]*$")
_PATH_LOCAL_RANK: Final = re.compile(
    r"attempt_\d{1,5}/(\d{1,5})/(?:stdout|stderr|error)\.\w+$"
)
# glog's time has no year and no time zone, and c10's month has no leading zero.
_GLOG_TIME: Final = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)(\.\d{1,6})?")
_ISO_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
)
_DMESG_TIME: Final = re.compile(
    r"\[\w{3} (\w{3}) +(\d{1,2}) (\d\d:\d\d:\d\d) (\d{4})\]"
)
_SYSLOG_TIME: Final = re.compile(r"(\w{3}) +(\d{1,2}) (\d\d:\d\d:\d\d)(?:\.\d{1,9})? ")
_MONTHS: Final = "JanFebMarAprMayJunJulAugSepOctNovDec"
# The file and line of C++ before a message, and the advice of gloo after it.
_CPP_PLACE: Final = re.compile(r"\[[^\]\s]{1,200}\.(?:cc|cpp|h):\d{1,6}\] ")
_ADVICE: Final = re.compile(r"\. This is typically caused by .*")


class _Traceback:
    """An open traceback.

    Attributes:
        source: Whose exception it is, which may differ from who printed it.
        indent: Spaces before each of its lines.
        position: Where it starts.
        time: When it was printed, 0 if not known.
        lines: Number of its lines.
        own_frame: The innermost frame that is not of a library.
        last_frame: The innermost frame.
        in_torch: Whether the innermost frame is of torch.distributed.
    """

    def __init__(
        self,
        source: OutputSource,
        position: tuple[int, int],
        time: float,
        indent: int = 0,
    ) -> None:
        self.source = source
        self.indent = indent
        self.position = position
        self.time = time
        self.lines = 0
        self.own_frame = self.last_frame = ""
        self.in_torch = False

    def add_line(self, text: str) -> None:
        """Add an indented line; the frame that is printed last is the innermost."""
        self.lines += 1
        if match := _FRAME.match(text):
            path, line, function = match.groups()
            self.last_frame = _frame_text(function or "?", path, line)
            self.in_torch = "/torch/distributed/" in path
            if not _LIBRARY.search(path):
                self.own_frame = self.last_frame


@dataclass(slots=True)
class _Ended:
    """The last traceback of a source, which another one may continue.

    Attributes:
        index: Position of its failure among all, -1 if there is none.
        traceback: The traceback.
        continues: Whether a line announced another traceback.
    """

    index: int
    traceback: _Traceback
    continues: bool = False


@dataclass(slots=True)
class _Block:
    """The fields of one worker in torchrun's report of failures."""

    time: float = 0.0
    host: str = ""
    rank: int = NO_RANK
    local_rank: int = NO_RANK


class OutputReader:
    """Reads the lines of one file."""

    def __init__(
        self, output: JobOutput, file: str, number: int, written: float
    ) -> None:
        """Start a file.

        Args:
            output: What is added to.
            file: Its name.
            number: Its position among the files.
            written: When it was written last, for times that have no year.
        """
        self._output = output
        self._file = file
        self._number = number
        self._written = written
        self._line = 0
        self._open: dict[OutputSource, _Traceback] = {}
        self._ended: dict[OutputSource, _Ended] = {}
        self._stacks: dict[OutputSource, Stack] = {}
        self._watchdog_calls: set[tuple[int, str]] = set()
        self._root_cause = False
        self._block = _Block()
        rank, local_rank = _PATH_RANK.search(file), _PATH_LOCAL_RANK.search(file)
        if rank:
            self._default = OutputSource("", int(rank[1]))
        else:
            local = int(local_rank[1]) if local_rank else NO_RANK
            self._default = OutputSource(file, NO_RANK, local)

    def add(self, line: bytes, wrapped_time: str = "") -> None:
        """Read a line.

        Args:
            line: The line as it was printed.
            wrapped_time: Its time, if a container runtime has one.
        """
        self._line += 1
        text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        source, start = self._source(text)
        prefix = f"{wrapped_time} {text[:start]}" if start or wrapped_time else ""
        text = text[start:]
        if not text:
            return
        if (traceback := self._open.get(source)) is not None:
            if self._continue_traceback(source, traceback, text):
                return
        elif source in self._stacks and self._continue_stack(source, text):
            return
        ended = self._ended.get(source)
        if ended is not None and text.strip() in _CHAINED:
            ended.continues = True
            return
        if not _NOTABLE.search(text):
            if ended is not None and not text.startswith(" "):
                del self._ended[source]
        elif self._notable(source, prefix, text):
            return
        if not _JSON_PART.match(text):
            self._count(source, prefix, text)

    def _source(self, text: str) -> tuple[OutputSource, int]:
        """Return the source of a line, and where its text starts."""
        rank = local_rank = NO_RANK
        name = ""
        position = 0
        for _ in range(_MAX_PREFIXES):
            match = _PREFIX.match(text, position)
            if match is None:
                break
            position = match.end()
            if match["rank"]:
                rank = int(match["rank"])
            elif match["local"]:
                local_rank = int(match["local"])
            elif match["pod"] or match["actor"]:
                name = match["pod"] or match["actor"]
        if rank != NO_RANK:
            if (local := max(local_rank, self._default.local_rank)) != NO_RANK:
                self._output.learn_rank(self._file, local, rank)
            return OutputSource("", rank), position
        if local_rank != NO_RANK or name:
            return OutputSource(self._file, NO_RANK, local_rank, name), position
        return self._default, position

    def _count(self, source: OutputSource, prefix: str, text: str) -> None:
        lines = self._output.lines.get(source)
        if lines is None:
            if len(self._output.lines) >= MAX_SOURCES:
                return
            lines = self._output.lines[source] = SourceLines()
        lines.count += 1
        lines.last = text[:_MAX_TEXT_LENGTH]
        lines.last_prefix = prefix

    def _time(self, *texts: str) -> float:
        times = (line_time(each, self._written) for each in texts)
        return next(filter(None, times), 0.0)

    def _notable(self, source: OutputSource, prefix: str, text: str) -> bool:
        """Read a line with a failure. Return whether it is a part of a larger text."""
        time = self._time(prefix, text)
        if self._block_line(source, text):
            return True
        if text.endswith(_TRACEBACK):
            self._start_traceback(source, time)
            return True
        if _TRACEBACK in text and "{" in text:
            self._json(source, text, time)
        elif match := _CLOSING.search(text):
            if len(self._output.closed) < MAX_EXITS:
                self._output.closed.add(int(match[1]))
        elif match := _EXIT.search(text):
            block = _Block(time, local_rank=int(match[2]))
            self._add_exit(source, block, int(match[3]), int(match[1]))
        elif _STACK_START.match(text):
            if len(self._stacks) < _MAX_STACKS:
                is_main = text.startswith("Current") or '"MainThread"' in text
                self._stacks[source] = Stack(is_main=is_main)
            return True
        else:
            self._one_line(source, text, time)
        return False

    def _one_line(self, source: OutputSource, text: str, time: float) -> None:
        """Read a failure that is one line."""
        if match := _WATCHDOG.search(text):
            # The exception that ends the process repeats the line.
            call = int(match[1]), match[2]
            if call not in self._watchdog_calls and len(self._watchdog_calls) < (
                MAX_SOURCES
            ):
                self._watchdog_calls.add(call)
                seconds = int(match[3]) / 1000
                said = f"{call[1]} did not end within {seconds:.0f} s"
                kind = FailureKind.TIMEOUT
                self._add(OutputSource("", call[0]), kind, said, "NCCL watchdog", time)
        elif match := _KERNEL_KILL.search(text):
            said = f"out of memory: the kernel killed process {match[1]} ({match[2]})"
            kind = FailureKind.OUT_OF_MEMORY
            self._add(source, kind, said, "kernel", time, pid=int(match[1]))
        elif match := _OOM_EVENT.search(text):
            said = f"out of memory: {match[0]}"
            kind = FailureKind.OUT_OF_MEMORY
            self._add(source, kind, said, "out-of-memory kill", time)
        elif match := _SHELL_KILLED.match(text):
            said, pid = "killed by SIGKILL", int(match[1] or 0)
            self._add(source, FailureKind.SIGNAL, said, "shell", time, pid=pid)
        elif match := _XID.search(text):
            said = f"GPU error Xid {match[2]} on {match[1]}: {match[3]}"
            self._add(source, FailureKind.GPU, said, "kernel", time)
        elif match := _FATAL.search(text):
            self._add(source, FailureKind.SIGNAL, match[1], "faulthandler", time)

    def _add(
        self,
        source: OutputSource,
        kind: FailureKind,
        text: str,
        evidence: str,
        time: float,
        pid: int = 0,
    ) -> None:
        position = self._number, self._line
        text = text[:_MAX_TEXT_LENGTH]
        self._output.add_failure(
            OutputFailure(source, kind, text, "", evidence, time, position, pid)
        )

    def _start_traceback(self, source: OutputSource, time: float) -> None:
        if len(self._open) >= MAX_SOURCES:
            return
        known = self._ended.get(source)
        owner, indent = source, 0
        if known is not None and known.continues:
            owner, indent = known.traceback.source, known.traceback.indent
        position = self._number, self._line
        self._open[source] = _Traceback(owner, position, time, indent)

    def _continue_traceback(
        self, source: OutputSource, traceback: _Traceback, text: str
    ) -> bool:
        """Add a line to a traceback. Return whether it belongs to it."""
        text = text.removeprefix(" " * traceback.indent)
        if text.startswith(" ") and traceback.lines < _MAX_TRACEBACK_LINES:
            traceback.add_line(text)
            return True
        del self._open[source]
        match = _EXCEPTION.match(text)
        if match is None or not traceback.lines:
            return False
        self._end_traceback(source, traceback, match[1], match[2] or "")
        return True

    def _end_traceback(
        self, source: OutputSource, traceback: _Traceback, name: str, message: str
    ) -> None:
        name = name.rpartition(".")[2]
        if name == "ChildFailedError":
            # What follows is torchrun's report of its workers.
            return
        kind = exception_kind(name, message, in_torch=traceback.in_torch)
        message = _ADVICE.sub("", _CPP_PLACE.sub("", message))
        text = f"{name}: {message}" if message else name
        # torchrun's agent raises it when it gets a signal, and it has its own name.
        if name == "SignalException" and (match := _GOT_SIGNAL.search(message)):
            text = exit_text(-int(match[1]))
        lines = self._output.lines.get(traceback.source)
        failure = OutputFailure(
            source=traceback.source,
            kind=kind,
            text=text[:_MAX_TEXT_LENGTH],
            where=traceback.own_frame or traceback.last_frame,
            evidence="traceback",
            time=traceback.time,
            position=traceback.position,
            lines_before=lines.count if lines is not None else 0,
        )
        known = self._ended.pop(source, None)
        failures = self._output.failures
        if known is not None and known.continues and known.index >= 0:
            index = known.index
            failures[index] = _chained(failures[index], failure)
        else:
            index = self._output.add_failure(failure)
        if len(self._ended) < MAX_SOURCES:
            self._ended[source] = _Ended(index, traceback)

    def _continue_stack(self, source: OutputSource, text: str) -> bool:
        """Add a frame to a stack. Return whether the line is one."""
        stack = self._stacks[source]
        if match := _FRAME.match(text):
            path, line, function = match.groups()
        elif match := _PY_SPY_FRAME.match(text):
            function, path, line = match.groups()
        else:
            del self._stacks[source]
            return False
        known = self._output.stacks.get(source)
        if known is not stack:
            # Of the threads of one process, the main thread has the job's own code.
            if known is not None and known.is_main and not stack.is_main:
                return True
            if known is None and len(self._output.stacks) >= _MAX_STACKS:
                return True
            self._output.stacks[source] = stack
        if len(stack.frames) < _MAX_FRAMES:
            stack.frames.append(_frame_text(function or "?", path, line))
        return True

    def _json(self, source: OutputSource, text: str, time: float) -> None:
        """Read the tracebacks in a JSON object, such as torchrun's error file."""
        try:
            value = json.loads(text[text.index("{") :])
        except (ValueError, RecursionError):
            return
        if not isinstance(value, dict):
            return
        with suppress(*INVALID):
            source = OutputSource("", validation.integer(value["rank"], MAX_RANKS))
        texts: list[str] = []
        times: list[float] = []
        _search_json(value, texts, times)
        time = max([time, *times])
        for each in texts:
            if len(self._open) < MAX_SOURCES:
                self._read_text(source, each, time)

    def _read_text(self, source: OutputSource, text: str, time: float) -> None:
        """Read a text of several lines as if its source had printed it."""
        for line in text.splitlines():
            traceback = self._open.get(source)
            if traceback is not None and self._continue_traceback(
                source, traceback, line
            ):
                continue
            if line.endswith(_TRACEBACK):
                self._start_traceback(source, time)
            elif line in _CHAINED and source in self._ended:
                self._ended[source].continues = True
        self._open.pop(source, None)
        self._ended.pop(source, None)

    def _block_line(self, source: OutputSource, text: str) -> bool:
        """Read a line of torchrun's report of failures."""
        if text.startswith("Root Cause (first"):
            self._root_cause = True
        elif text.startswith("Failures:"):
            self._root_cause = False
        elif match := _BLOCK_FIELD.match(text):
            self._block_field(source, match[1], match[2])
        else:
            return False
        return True

    def _block_field(self, source: OutputSource, name: str, value: str) -> None:
        block = self._block
        position = self._number, self._line
        if name == "time":
            # torchrun writes 2026-11-16_09:12:44.
            self._block = _Block(self._time(value.replace("_", " ", 1)))
        elif name == "host":
            block.host = value[:_MAX_HOST_LENGTH]
        elif name == "rank" and (match := _BLOCK_RANK.match(value)):
            block.rank, block.local_rank = int(match[1]), int(match[2])
            self._output.learn_rank(self._file, block.local_rank, block.rank)
        elif name == "exitcode" and (match := _BLOCK_EXIT.match(value)):
            self._add_exit(source, block, int(match[2]), int(match[1]))
        elif (
            name == "traceback"
            and value.endswith(_TRACEBACK)
            and block.rank != NO_RANK
            and len(self._open) < MAX_SOURCES
        ):
            self._open[source] = _Traceback(
                OutputSource("", block.rank), position, block.time, indent=2
            )

    def _add_exit(
        self, source: OutputSource, block: _Block, pid: int, exit_code: int
    ) -> None:
        self._output.add_exit(
            WorkerExit(
                rank=block.rank,
                local_rank=block.local_rank,
                pid=pid,
                host=block.host,
                exit_code=exit_code,
                root_cause=self._root_cause and block.rank != NO_RANK,
                time=block.time,
                position=(self._number, self._line),
                source=source,
            )
        )


def _chained(first: OutputFailure, second: OutputFailure) -> OutputFailure:
    """Return one failure for an exception and the one that it led to.

    The second one is what ended the process. It is a consequence if the first one is,
    and it is left out if only the second one is.
    """
    if first.kind.is_cause and not second.kind.is_cause:
        return first
    kind = second.kind if first.kind.is_cause else first.kind
    return second._replace(
        kind=kind,
        position=first.position,
        time=first.time or second.time,
        caused_by=first.caused_by or first.text,
    )


def _frame_text(function: str, path: str, line: str) -> str:
    return f"{function}, {path.rpartition('/')[2]}:{line}"


def _search_json(value: Any, texts: list[str], times: list[float]) -> None:
    """Collect texts with a traceback and the times beside them."""
    pending = [value]
    for _ in range(_MAX_JSON_VALUES):
        if not pending:
            break
        current = pending.pop()
        if isinstance(current, str):
            if _TRACEBACK in current:
                texts.append(current)
        elif isinstance(current, list):
            pending += current[:_MAX_JSON_VALUES]
        elif isinstance(current, dict):
            pending += list(current.values())[:_MAX_JSON_VALUES]
            stamp = current.get("timestamp")
            if isinstance(stamp, str) and stamp[:11].isdecimal():
                stamp = int(stamp[:11])
            try:
                times.append(parse_timestamp(stamp))
            except INVALID:
                continue


def line_time(text: str, written: float) -> float:
    """Return the time that a line starts with, in seconds since 1970, else 0.

    Args:
        text: The line.
        written: When its file was last written. A time without a year is the last
            such time before.
    """
    text = text[:_MAX_TIME_LENGTH]
    if match := _ISO_TIME.search(text):
        return _valid_time(match[0].replace(",", "."))
    if match := _DMESG_TIME.search(text):
        month, day, clock, year = match.groups()
        return _valid_time(f"{year}-{_month(month)}-{int(day):02} {clock}")
    if match := _GLOG_TIME.search(text):
        month, day, clock, fraction = match.groups()
        return _recent_time(f"{int(month):02}-{day} {clock}{fraction or ''}", written)
    if match := _SYSLOG_TIME.search(text):
        month, day, clock = match.groups()
        return _recent_time(f"{_month(month)}-{int(day):02} {clock}", written)
    return 0.0


def _month(name: str) -> str:
    # Another name is month 00, which is invalid.
    return f"{_MONTHS.find(name) // 3 + 1:02}"


def _recent_time(text: str, written: float) -> float:
    """Return a time without a year: the last one before a file was written."""
    year = datetime.fromtimestamp(written, UTC).year
    for each in (year, year - 1):
        time = _valid_time(f"{each}-{text}")
        if time and time < written + _DAY:
            return time
    return 0.0


def _valid_time(text: str) -> float:
    try:
        return parse_timestamp(text)
    except INVALID:
        return 0.0
