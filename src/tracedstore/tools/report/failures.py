"""Puts the failures of all processes in order: causes first, then their consequences.

A process may have logged an event, printed a traceback and ended with a signal. These
are one failure. Failures with the same content on several ranks are one group.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

from tracedstore import names
from tracedstore.common.errors import TIMEOUT
from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import plural
from tracedstore.tools.report.failure_kinds import (
    FailureKind,
    exception_kind,
    exit_kind,
    exit_text,
)
from tracedstore.tools.report.job_output import (
    JobOutput,
    OutputFailure,
    OutputSource,
    WorkerExit,
)
from tracedstore.tools.report.logged_events import (
    NO_RANK,
    FirstFailure,
    LoggedEvents,
    LoggedProcess,
)

_KIND_OF_EVENT: Final = {
    names.BARRIER_TIMEOUT: FailureKind.TIMEOUT,
    names.RENDEZVOUS_TIMEOUT: FailureKind.TIMEOUT,
}
# Lines that a process prints after an exception that ends it, at most.
_MAX_LINES_AFTER = 20
_DIGITS: Final = re.compile(r"\d+")
_CONSEQUENCES: Final = {
    FailureKind.DISCONNECTED: "lost connection",
    FailureKind.TIMEOUT: "timeout",
    FailureKind.STOPPED: "signal to stop",
}
# Evidence of an exit.
TORCHRUN: Final = "torchrun"
_EVENTS: Final = frozenset(names.EVENT_NAMES)
# Evidence whose numbers say what the failure is.
_EXACT: Final = _EVENTS | {"NCCL watchdog"}


@dataclass(slots=True)
class ProcessFailure:
    """What went wrong in one process.

    Attributes:
        process: The process.
        kind: What it is.
        subject: The exception, the signal, or the barrier or call that failed.
        error: Error type and message of an event, else where it was raised.
        evidence: Name of the event, or what it was read from.
        time: Seconds since 1970, 0 if not known.
        position: Number of its file, and of its line there.
        exit: How the process ended, "" if not known.
        root_cause: Whether torchrun names it as the first observed failure.
    """

    process: LoggedProcess
    kind: FailureKind
    subject: str
    error: str
    evidence: str
    time: float
    position: tuple[int, int] = (0, 0)
    exit: str = ""
    root_cause: bool = False

    @property
    def is_event(self) -> bool:
        """Whether it was logged as an event."""
        return self.evidence in _EVENTS

    @property
    def order(self) -> tuple[int, float, tuple[int, int]]:
        """Causes first, then by time, and by line where the time is not known."""
        return self.kind.order, self.time or inf, self.position

    @property
    def content(self) -> tuple[str, str, str]:
        """What the failures of a group have in common."""
        if self.kind is FailureKind.STOPPED:
            return "", "", ""
        if self.evidence in _EXACT:
            return self.evidence, self.subject, self.error
        if not self.kind.is_cause and self.evidence == "traceback":
            # gloo's messages name the other side, and whether it sent or received.
            return self.evidence, self.kind.name, self.error
        return self.evidence, _DIGITS.sub("0", self.subject), self.error


@dataclass(slots=True)
class FailureGroup:
    """Failures with the same content.

    Attributes:
        failure: The first of them.
        processes: The processes that have it.
        exits: How these ended.
        root_causes: Ranks that torchrun names as the first failure.
    """

    failure: ProcessFailure
    processes: list[LoggedProcess] = field(default_factory=list)
    exits: dict[str, None] = field(default_factory=dict)
    root_causes: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The ranks among its processes."""
        return [each.rank for each in self.processes if each.rank != NO_RANK]


def failure_groups(logged: LoggedEvents, output: JobOutput) -> list[FailureGroup]:
    """Return the failures of all processes: causes first, and the earliest first."""
    groups: dict[tuple[str, str, str], FailureGroup] = {}
    for failure in sorted(_failures(logged, output), key=lambda each: each.order):
        group = groups.setdefault(failure.content, FailureGroup(failure))
        group.processes.append(failure.process)
        if failure.exit:
            group.exits.setdefault(failure.exit)
        if failure.root_cause:
            group.root_causes.append(failure.process.rank)
    return list(groups.values())


def _failures(logged: LoggedEvents, output: JobOutput) -> Iterator[ProcessFailure]:
    """Yield the failure of each process that has one."""
    one_job = len({process.run_id for process in logged.first_failures}) <= 1
    of_process: dict[LoggedProcess | OutputSource | int, list[ProcessFailure]] = {}

    def add(failure: ProcessFailure, source: OutputSource | None = None) -> None:
        process: LoggedProcess | OutputSource | int = failure.process
        if source is not None and failure.process.rank == NO_RANK:
            process = source
        elif failure.process.rank != NO_RANK and (one_job or source is not None):
            process = failure.process.rank
        of_process.setdefault(process, []).append(failure)

    for process, first in logged.first_failures.items():
        add(_from_event(process, first))
    exits = [each for each in output.exits.values() if each.exit_code]
    killed = [each for each in exits if _unexplained_kill(each, output)]
    failed_ranks = {_worker_process(each, output).rank for each in exits} - {NO_RANK}
    for printed in output.failures:
        if printed.pid and (matched := _exit_of(printed, exits, killed)):
            worker, same_pid = matched
            add(_from_kill(printed, worker, output, same_pid=same_pid), worker.source)
        elif not (printed.evidence == "shell" and killed):
            add(_from_output(printed, output, failed_ranks), printed.source)
    for worker in exits:
        failure = _from_exit(worker, output)
        add(failure, worker.source)
    for of_one in of_process.values():
        yield _merged(of_one)


def _unexplained_kill(worker: WorkerExit, output: JobOutput) -> bool:
    return worker.exit_code == -signal.SIGKILL and worker.pid not in output.closed


def _exit_of(
    printed: OutputFailure, exits: list[WorkerExit], killed: list[WorkerExit]
) -> tuple[WorkerExit, bool] | None:
    """Return the worker that a kernel's or a shell's line is about.

    A container has pids of its own, so the kernel's pid may be another one. Then the
    line is about the only worker that was killed.
    """
    same_pid = [each for each in exits if each.pid == printed.pid]
    if len(same_pid) == 1:
        return same_pid[0], True
    return (killed[0], False) if len(killed) == 1 and not same_pid else None


def _from_event(process: LoggedProcess, first: FirstFailure) -> ProcessFailure:
    kind = _KIND_OF_EVENT.get(first.event)
    if kind is None:
        name, _, message = first.error.partition(": ")
        kind = exception_kind(name.rpartition(".")[2], message, in_torch=True)
        kind = FailureKind.TIMEOUT if name == TIMEOUT else kind
    return ProcessFailure(
        process, kind, first.subject, first.error, first.event, first.time
    )


def _from_output(
    printed: OutputFailure, output: JobOutput, failed_ranks: set[int]
) -> ProcessFailure:
    lines = output.lines.get(printed.source)
    rank = output.rank(printed.source)
    lines_after = lines.count - printed.lines_before if lines is not None else 0
    kind = printed.kind
    if (
        printed.evidence == "traceback"
        and lines_after > _MAX_LINES_AFTER
        and rank not in failed_ranks
    ):
        kind = FailureKind.CAUGHT
    error = f"in {printed.where}" if printed.where else ""
    if printed.caused_by:
        error += f"{', ' if error else ''}caused by {printed.caused_by}"
    return ProcessFailure(
        process=_process(printed.source, output, printed.pid),
        kind=kind,
        subject=printed.text,
        error=error,
        evidence=printed.evidence,
        time=printed.time,
        position=printed.position,
    )


def _from_kill(
    printed: OutputFailure, worker: WorkerExit, output: JobOutput, *, same_pid: bool
) -> ProcessFailure:
    failure = _from_exit(worker, output)
    failure.kind, failure.subject = printed.kind, printed.text
    failure.evidence, failure.time = printed.evidence, printed.time or worker.time
    if not same_pid:
        failure.error = (
            f"its pid is {worker.pid} here; it is the only worker that was killed"
        )
    return failure


def _from_exit(worker: WorkerExit, output: JobOutput) -> ProcessFailure:
    stopped = worker.pid in output.closed
    kind = exit_kind(worker.exit_code, stopped=stopped)
    ended = exit_text(worker.exit_code)
    return ProcessFailure(
        process=_worker_process(worker, output),
        kind=kind,
        subject=ended,
        error="",
        evidence=TORCHRUN,
        time=worker.time,
        position=worker.position,
        exit=ended,
        root_cause=worker.root_cause,
    )


def _worker_process(worker: WorkerExit, output: JobOutput) -> LoggedProcess:
    rank = worker.rank
    if rank == NO_RANK:
        rank = output.rank(worker.source._replace(local_rank=worker.local_rank))
    return LoggedProcess("", rank, worker.host, worker.pid)


def _process(source: OutputSource, output: JobOutput, pid: int) -> LoggedProcess:
    rank = output.rank(source)
    name = "" if rank != NO_RANK else source.shown
    return LoggedProcess("", rank, "", pid, name)


def _merged(of_one: list[ProcessFailure]) -> ProcessFailure:
    """Return the failure that explains the end of one process.

    What it printed says more than its exit code, and its event says more about a wait.
    An exception does not end a process with SIGKILL, so it was caught then.
    """
    exits = [each for each in of_one if each.evidence == TORCHRUN]
    others = [each for each in of_one if each.evidence != TORCHRUN]
    killed = any(
        each.kind is FailureKind.SIGNAL and each.exit == "SIGKILL" for each in exits
    )
    if killed:
        memory = [each for each in others if each.kind is FailureKind.OUT_OF_MEMORY]
        others = [each for each in memory if each.evidence != "traceback"]
    main = min(
        others or exits,
        key=lambda each: (
            each.kind.order,
            each.is_event == each.kind.is_cause,
            each.time if each.is_event else 0.0,
            each.position,
        ),
    )
    for each in exits:
        main.exit = main.exit or each.exit
        main.root_cause |= each.root_cause
        if not main.process.host:
            main.process = main.process._replace(host=each.process.host)
    if not main.time:
        main.time = min((each.time for each in of_one if each.time), default=0.0)
    return main


def certainty(
    groups: list[FailureGroup], logged: LoggedEvents, output: JobOutput
) -> list[str]:
    """Return sentences on how sure it is that the first group is the cause.

    Args:
        groups: Failures that the job did not catch.
        logged: The events.
        output: What the logs contain besides events.
    """
    first, *others = groups
    sentences = []
    if first.failure.subject == "SIGKILL":
        sentences.append(
            "No line says who sent it; the kernel sends it when memory is exhausted,"
            " and says so in its log (dmesg)."
        )
    if not first.failure.kind.is_cause:
        sentences.append(
            "This is a consequence, and no failure in the logs is its cause."
        )
        if silent := _silent(groups, logged, output):
            named = ranks_text(silent)
            sentences.append(f"No failure of {named} is logged.")
    else:
        causes = [each for each in others if each.failure.kind.is_cause]
        if victims := [each for each in others if not each.failure.kind.is_cause]:
            sentences.append(_consequences(victims))
        if causes:
            sentences.append(_other_causes(first, causes))
    # Each restart has one.
    if roots := [rank for each in groups for rank in each.root_causes]:
        named = ranks_text(sorted(set(roots)))
        sentences.append(f"torchrun names {named} as the root cause.")
    return sentences


def _silent(
    groups: list[FailureGroup], logged: LoggedEvents, output: JobOutput
) -> list[int]:
    """Return the ranks without a failure of their own, if most others have one."""
    known = {output.rank(source) for source in output.lines}
    known.update(logged.last_events, *(each.ranks for each in groups))
    failed = {
        rank
        for group in groups
        if group.failure.kind is not FailureKind.STOPPED
        for rank in group.ranks
    }
    silent = known - failed - {NO_RANK}
    return sorted(silent) if len(silent) <= len(failed) else []


def _consequences(victims: Iterable[FailureGroup]) -> str:
    counts: Counter[FailureKind] = Counter()
    for group in victims:
        counts[group.failure.kind] += len(group.processes)
    parts = [
        plural(counts[kind], noun)
        for kind, noun in _CONSEQUENCES.items()
        if counts[kind]
    ]
    total = plural(counts.total(), "other process", "es")
    return f"The failures of {total} are consequences: {', '.join(parts)}."


def _other_causes(first: FailureGroup, causes: list[FailureGroup]) -> str:
    count = plural(sum(len(each.processes) for each in causes), "other process", "es")
    files = {each.failure.position[0] for each in (first, *causes)}
    if all(each.failure.time for each in (first, *causes)):
        return f"It is the earliest; {count} failed in another way."
    if len(files) == 1:
        return f"It is the first in the log; {count} failed in another way."
    return (
        f"{count[:1].upper()}{count[1:]} failed in another way, and which was first is"
        " not known: it is likely, not certain."
    )
