"""What a job printed besides events: failures, exits, stacks, last lines."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tracedstore.tools.report.failure_kinds import FailureKind
from tracedstore.tools.report.flight_dumps import RankDump
from tracedstore.tools.report.logged_events import NO_RANK

MAX_SOURCES: Final = 10_000
MAX_EXITS: Final = 10_000
_MAX_FAILURES = 10_000


class OutputSource(NamedTuple):
    """Where lines come from.

    Attributes:
        file: The file, "" where the rank is enough.
        rank: The rank, or NO_RANK.
        local_rank: The local rank, or NO_RANK.
        name: A pod or an actor, else "".
    """

    file: str
    rank: int = NO_RANK
    local_rank: int = NO_RANK
    name: str = ""

    @property
    def is_of_rank(self) -> bool:
        """Whether a rank printed it, even if it is not known which one."""
        return self.rank != NO_RANK or self.local_rank != NO_RANK

    @property
    def shown(self) -> str:
        """What it is called where its rank is not known."""
        file = "/".join(self.file.split("/")[-3:])
        if self.local_rank != NO_RANK:
            return f"local rank {self.local_rank} in {file}"
        return f"{self.name} in {file}" if self.name else file


class OutputFailure(NamedTuple):
    """A failure that a process printed.

    Attributes:
        source: Who printed it.
        kind: What it is.
        text: Exception type and message, or what the line says.
        where: Function, file and line of the job's own code; "" if not known.
        evidence: What kind of output it is.
        time: Seconds since 1970, 0 if not known.
        position: Number of its file, and of its line there.
        pid: The process; 0 if not known.
        caused_by: The exception that the job names as the cause of this one.
        lines_before: Number of lines that the source had printed before.
    """

    source: OutputSource
    kind: FailureKind
    text: str
    where: str
    evidence: str
    time: float
    position: tuple[int, int]
    pid: int = 0
    caused_by: str = ""
    lines_before: int = 0


class WorkerExit(NamedTuple):
    """How a worker of torchrun ended.

    Attributes:
        rank: Its rank, or NO_RANK.
        local_rank: Its local rank.
        pid: Its process.
        host: Its host, as torchrun prints it; "" if not known.
        exit_code: Its exit code, negative for a signal.
        root_cause: Whether torchrun names it as the first observed failure.
        time: When torchrun saw it, 0 if not known.
        position: As of OutputFailure.
        source: Who printed it.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    exit_code: int
    root_cause: bool
    time: float
    position: tuple[int, int]
    source: OutputSource


@dataclass(slots=True)
class SourceLines:
    """What one source printed.

    Attributes:
        count: Number of lines that are neither empty nor of a traceback or a stack.
        last: The last of these.
        last_prefix: What was before that line, which may have its time.
    """

    count: int = 0
    last: str = ""
    last_prefix: str = ""


@dataclass(slots=True)
class Stack:
    """A stack that faulthandler or py-spy printed.

    Attributes:
        is_main: Whether it is of the main or of the current thread.
        frames: Function, file and line of the innermost frames.
    """

    is_main: bool
    frames: list[str] = field(default_factory=list)


@dataclass(slots=True)
class JobOutput:
    """What all files contain besides events.

    Attributes:
        failures: Failures, at most 10,000.
        exits: Exits of torchrun's workers by process.
        closed: Processes to which torchrun sent a signal.
        lines: What each source printed.
        stacks: Stacks, at most 100.
        dumps: Dumps of Flight Recorder, by rank.
        last_write: When the last of the files was written, 0 if not known.
        read_at: When they were read.
        unread: Failures beyond the limit.
    """

    failures: list[OutputFailure] = field(default_factory=list)
    exits: dict[tuple[str, int], WorkerExit] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    lines: dict[OutputSource, SourceLines] = field(default_factory=dict)
    stacks: dict[OutputSource, Stack] = field(default_factory=dict)
    dumps: dict[int, RankDump] = field(default_factory=dict)
    last_write: float = 0.0
    read_at: float = 0.0
    unread: int = 0
    _ranks: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @property
    def of_job(self) -> bool:
        """Whether a job wrote it: a failure, an exit, a stack, a dump or a rank."""
        found = self.failures or self.exits or self.stacks or self.dumps
        return bool(found) or any(source.is_of_rank for source in self.lines)

    def rank(self, source: OutputSource) -> int:
        """Return the rank of a source, NO_RANK if it is not known.

        A local rank is one of several ranks if the logs are of several nodes.
        """
        if source.rank != NO_RANK or source.local_rank == NO_RANK:
            return source.rank
        of_file = self._ranks.get((source.file, source.local_rank), set())
        ranks = of_file or self._ranks.get(("", source.local_rank), set())
        return next(iter(ranks)) if len(ranks) == 1 else NO_RANK

    def learn_rank(self, file: str, local_rank: int, rank: int) -> None:
        """Remember that a local rank is this rank, in a file and at all."""
        for key in ((file, local_rank), ("", local_rank)):
            if len(self._ranks) < MAX_SOURCES:
                self._ranks.setdefault(key, set()).add(rank)

    def add_failure(self, failure: OutputFailure) -> int:
        """Add a failure. Return its position, -1 if there are too many."""
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(failure)
            return len(self.failures) - 1
        self.unread += 1
        return -1

    def add_dump(self, dump: RankDump) -> None:
        """Add a dump. Of two of one rank, that with the later call counts."""
        known = self.dumps.get(dump.rank)
        if known is None or known.last_created <= dump.last_created:
            self.dumps[dump.rank] = dump

    def add_exit(self, worker: WorkerExit) -> None:
        """Add how a worker ended. The line with its rank knows most."""
        known = self.exits.get((worker.host, worker.pid))
        if known is None and worker.host:
            # A line of the log had no host.
            known = self.exits.pop(("", worker.pid), None)
        if known is not None and worker.rank == NO_RANK:
            return
        if known is not None:
            worker = worker._replace(position=known.position)
        if len(self.exits) < MAX_EXITS:
            self.exits[worker.host, worker.pid] = worker
