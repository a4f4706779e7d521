"""Judges the results of a case against what was injected.

All times are of the monotonic clock, which the processes of one machine share. A rank
has arrived when its `add` to the count has returned; while the call is under way, both
verdicts are right. So a machine under load cannot make a right verdict wrong.
"""

import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from faults.cases import Case
from tracedstore import names

COLUMNS = ("wrong verdicts", "disagreements", "hangs", "aborts", "lost counts")
WRONG, DISAGREEMENTS, HANGS, ABORTS, LOST = COLUMNS

# Seconds that a rank reads who is missing, at most.
READ_BOUND = 4.0
# Seconds that a verdict may take after the barrier's timeout. A machine under load gets
# more time than is promised.
VERDICT_BOUND = READ_BOUND + 12.0
# Seconds that the store has to wake up a rank when the barrier completes.
_DELIVERY = 0.5
# Seconds from the verdict to the end of the process.
EXIT_BOUND = 20.0
# Faults after which a rank cannot write its events.
_LOG_LOST = ("limit_file_size", "limit_memory", "refuse_threads")
# Faults after which the store has forgotten arrivals.
_DATA_LOST = ("file_delete", "file_truncate", "server_restart")
# A FileStore that reads half an entry waits for the rest of it.
_BLOCKS_ALL = ("server_stop", "file_delete", "file_truncate")


@dataclass(kw_only=True)
class RankRecord:
    """What one rank did and reported.

    Attributes:
        rank: The rank.
        flavour: As in `Case.flavours`.
        steps: When the rank was at each step, by the step's name. ``counting`` is the
            time at which it called `add`, ``counted`` the time at which that returned.
        result: What its call returned or raised, None if it has not ended.
        ended: When its call ended.
        exit_status: As of `Popen.returncode`; None if it had to be killed.
        exited: When the process had ended.
        killed: The case killed it.
        may_fail: A fault is at its store, its memory or its disk.
        may_block: A fault blocks its store without end; its stall report is expected.
        lossy: The store forgot arrivals, so that a rank cannot know of all others. It
            must not name itself.
        unnamed: It cannot read who is missing: no thread can be started, for example.
        log_works: Its events can be read.
        events: Its events.
        output: The last other lines of its log: a traceback, for example.
        children: The reports of processes that it forked.
    """

    rank: int
    flavour: str = "traced"
    steps: dict[str, float] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    ended: float = 0.0
    exit_status: int | None = 0
    exited: float = 0.0
    killed: bool = False
    may_fail: bool = False
    may_block: bool = False
    lossy: bool = False
    unnamed: bool = False
    log_works: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    children: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """``completed``, ``timeout``, ``failed``, or "" without a result."""
        return "" if self.result is None else str(self.result["outcome"])

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that it named as missing."""
        return frozenset((self.result or {}).get("missing", ()))

    @property
    def possibly(self) -> frozenset[int]:
        """The ranks that it named as possibly missing."""
        return frozenset((self.result or {}).get("possibly", ()))

    @property
    def asked(self) -> float:
        """When it began to find out who is missing."""
        return self.steps.get("timed_out", self.ended)

    def read(self, lines: Sequence[dict[str, Any]]) -> None:
        """Read the lines that the rank sent to its director."""
        for line in lines:
            if line["kind"] == "step":
                self.steps[line["step"]] = line["at"]
            elif line["kind"] == "result":
                self.result, self.ended = line, line["ended"]
            elif line["kind"] == "child":
                self.children.append({"counts": line["counts"], "status": 0})
            elif line["kind"] == "child_ended" and line["status"] != 0:
                self.children.append({"status": line["status"]})

    def arrived_before(self, when: float) -> bool:
        """Return whether it was certainly counted before a time."""
        return self.steps.get("counted", math.inf) < when

    def absent_until(self, when: float) -> bool:
        """Return whether it was certainly not counted before a time."""
        return self.steps.get("counting", math.inf) > when


def record_of(case: Case, rank: int) -> RankRecord:
    """Return the record of a rank that has done nothing, with what it may do."""
    own = {fault.action for fault in case.faults_of(rank).values()}
    return RankRecord(
        rank=rank,
        flavour=case.flavours[rank],
        may_fail=_may_fail(case, rank),
        may_block=may_block(case, rank) or _may_hold_lock(case),
        lossy=any(fault.action in _DATA_LOST for fault in case.faults),
        unnamed="refuse_threads" in own,
        log_works=case.log == "file" and own.isdisjoint(_LOG_LOST),
    )


def may_block(case: Case, rank: int) -> bool:
    """Return whether a fault blocks the store of a rank without end."""
    return any(
        not fault.release
        and (
            fault.action in _BLOCKS_ALL
            or (fault.action == "proxy_hold" and rank in case.proxied)
        )
        for fault in case.faults
    )


def _may_hold_lock(case: Case) -> bool:
    """Return whether a rank that is stopped without end may hold a FileStore's lock."""
    return case.store == "file" and any(
        fault.action == "stop" and not fault.release for fault in case.faults
    )


def _may_fail(case: Case, rank: int) -> bool:
    # Nodes of a rendezvous depend on each other after they have joined.
    return case.protocol == "rendezvous" or any(
        fault.action.startswith(("server", "file"))
        or (fault.action.startswith("proxy") and rank in case.proxied)
        or (fault.action.startswith("limit") and fault.rank == rank)
        for fault in case.faults
    )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement of a case.

    Attributes:
        findings: Sentences by column; all are empty if the case is good.
        verdict_seconds: For each rank that timed out, the seconds from the timeout to
            the exception.
        skewed: A rank arrived while others read who is missing, so that different
            verdicts were right.
        undecidable: A plain torch rank took part, and another rank died after it was
            recorded and before it was counted. The store then has the same content as
            if the plain rank was missing; docs/barriers.md documents this limit.
    """

    findings: dict[str, list[str]]
    verdict_seconds: list[float] = field(default_factory=list)
    skewed: bool = False
    undecidable: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return not any(self.findings.values())


def judge_barrier(
    ranks: Sequence[RankRecord], world_size: int, timeout: float
) -> Judgement:
    """Judge the ranks of one barrier.

    Args:
        ranks: The records of all ranks, those that were never started included.
        world_size: The number of ranks.
        timeout: The barrier's timeout.
    """
    findings: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for record in ranks:
        findings[ABORTS] += aborts(record)
        findings[HANGS] += _hangs(record, timeout)
        findings[WRONG] += _wrong(record, ranks, world_size, timeout)
        findings[WRONG] += _wrong_events(record, ranks)
        findings[LOST] += lost_counts(record)
    skewed = _skewed(ranks)
    if not skewed:
        findings[DISAGREEMENTS] += _disagreements(ranks)
    return Judgement(
        findings=findings,
        verdict_seconds=[
            record.ended - record.asked
            for record in ranks
            if record.outcome == "timeout" and record.flavour != "torch"
        ],
        skewed=skewed,
        undecidable=bool(_confusable(ranks)),
    )


def aborts(record: RankRecord) -> Iterator[str]:
    """Yield processes that ended in another way than by the case or by themselves."""
    status = record.exit_status
    expected = {-signal.SIGKILL} if record.killed else {0}
    if status is not None and status not in expected:
        yield f"rank {record.rank} ended with status {status}"
    for child in record.children:
        if child["status"] != 0:
            yield f"a child of rank {record.rank} ended with status {child['status']}"


def _hangs(record: RankRecord, timeout: float) -> Iterator[str]:
    if record.killed or not record.steps:
        return
    # A rank whose wait has ended gets its verdict, even if the store does not respond.
    if record.may_block and record.result is None and "timed_out" not in record.steps:
        yield from unreported_stall(record)
        return
    if record.result is None:
        yield f"rank {record.rank} had no result after {timeout + VERDICT_BOUND:g} s"
        return
    waited = record.ended - record.asked
    if waited > VERDICT_BOUND:
        yield f"rank {record.rank} took {waited:.1f} s after the timeout"
    yield from exit_hangs(record)


def unreported_stall(record: RankRecord) -> Iterator[str]:
    """Yield a rank that is blocked and did not report that."""
    if record.log_works and not any(map(is_stall_report, record.events)):
        yield f"rank {record.rank} is blocked and did not report the stall"


def exit_hangs(record: RankRecord) -> Iterator[str]:
    """Yield a process that has its result and does not end."""
    if record.exit_status is None or record.exited - record.ended > EXIT_BOUND:
        yield f"rank {record.rank} did not exit within {EXIT_BOUND:g} s"


def _wrong(
    record: RankRecord, ranks: Sequence[RankRecord], world_size: int, timeout: float
) -> Iterator[str]:
    me = f"rank {record.rank}"
    if record.outcome == "completed":
        absent = [r.rank for r in ranks if r.absent_until(record.ended)]
        if absent and not record.lossy:
            yield f"{me} completed without ranks {absent}"
    elif record.outcome == "failed" and not record.may_fail:
        yield f"{me} failed: {(record.result or {}).get('error')}"
    elif record.outcome == "timeout" and record.flavour != "torch":
        # A TCPStore does not acknowledge what completes the barrier.
        completed = [
            r.steps.get("completed", math.inf) for r in ranks if not r.may_fail
        ]
        due = record.steps.get("waiting", record.ended) + timeout
        late = min(completed, default=math.inf) > due - _DELIVERY
        if not (record.may_fail or late):
            yield f"{me} timed out after the barrier was completed"
        if extra := sorted((record.missing | record.possibly) - set(range(world_size))):
            yield f"{me} named ranks {extra} of {world_size}"
        yield from _wrong_names(record, ranks)


def _wrong_names(record: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[str]:
    me = f"rank {record.rank}"
    present = {r.rank for r in ranks if r.arrived_before(record.asked)}
    absent = {r.rank for r in ranks if r.absent_until(record.ended)}
    if record.lossy:
        present, absent = {record.rank}, set()
    confusable = _confusable(ranks, record.asked, record.ended)
    present -= confusable
    absent -= confusable
    if accused := sorted(record.missing & present):
        yield f"{me} named ranks {accused} as missing, which had arrived"
    named = record.missing or record.possibly
    if unnamed := sorted(absent - named):
        yield f"{me} did not name ranks {unnamed}, which were missing"
    elif absent and not record.missing and _decidable(record, ranks):
        yield f"{me} named ranks {sorted(named)} as possible only"


def _confusable(
    ranks: Sequence[RankRecord], began: float = math.inf, ended: float = -math.inf
) -> set[int]:
    """Return the ranks that the store cannot tell apart: see `Judgement`.

    A rank that is recorded and not yet counted while another one reads, from ``began``
    to ``ended``, is as one that died there.
    """
    plain = {r.rank for r in ranks if r.flavour == "torch"}
    arriving = {
        r.rank
        for r in ranks
        if r.steps.get("recorded", math.inf) < ended and not r.arrived_before(began)
    }
    stopped = {
        r.rank for r in ranks if "recorded" in r.steps and "counting" not in r.steps
    }
    return plain | stopped | arriving if plain and stopped | arriving else set()


def _decidable(record: RankRecord, ranks: Sequence[RankRecord]) -> bool:
    """Return whether the store had all that is needed for certain names.

    It has not if the rank's time to read was over, or if a plain torch rank takes part;
    nor if one rank stopped after it was recorded, before it was counted, and another
    was counted and never confirmed it.
    """
    if record.may_fail or record.unnamed:
        return False
    if record.ended - record.asked >= READ_BOUND:
        return False  # it was held so long, or the machine is slow
    if any(r.flavour == "torch" for r in ranks):
        return False
    stopped = any(
        "recorded" in r.steps and not r.arrived_before(record.asked) for r in ranks
    )
    unconfirmed = any(
        "counting" in r.steps and r.steps.get("confirmed", math.inf) > record.ended
        for r in ranks
    )
    return not (stopped and unconfirmed)


def _wrong_events(record: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[str]:
    me = f"rank {record.rank}"
    began = record.steps.get("waiting", record.ended)
    present = {r.rank for r in ranks if r.arrived_before(began)}
    confusable = _confusable(ranks, began, record.ended)
    present = {record.rank} if record.lossy else present - confusable
    for event in events_of(record, "barrier.waiting"):
        if accused := sorted(present.intersection(event["missing_ranks"])):
            yield f"{me} warned that ranks {accused} are missing, which had arrived"
    if not record.log_works or record.flavour == "torch":
        return
    for outcome, name in (("timeout", "barrier.timeout"), ("failed", "barrier.failed")):
        events = events_of(record, name)
        if len(events) != (record.outcome == outcome):
            yield f"{me} ended as {record.outcome} with {len(events)} {name} events"
    for event in events_of(record, "barrier.timeout"):
        if set(event["missing_ranks"]) != record.missing:
            yield f"{me} raised {sorted(record.missing)}, its event {event}"


def lost_counts(record: RankRecord) -> Iterator[str]:
    """Yield counts that differ from what happened."""
    result = record.result or {}
    for name, (happened, counted) in result.get("counts", {}).items():
        if happened != counted:
            yield f"rank {record.rank}: {counted} of {happened} {name} were counted"
    for child in record.children:
        for name, (happened, counted) in child.get("counts", {}).items():
            if happened != counted:
                yield (
                    f"a child of rank {record.rank}: {counted} of {happened} {name}"
                    " were counted"
                )


def _skewed(ranks: Sequence[RankRecord]) -> bool:
    """Return whether a rank arrived while others read who is missing."""
    verdicts = [r for r in ranks if r.outcome == "timeout"]
    if not verdicts:
        return False
    first, last = min(r.asked for r in verdicts), max(r.ended for r in verdicts)
    return any(not r.absent_until(last) and not r.arrived_before(first) for r in ranks)


def _disagreements(ranks: Sequence[RankRecord]) -> Iterator[str]:
    verdicts = {
        r.rank: sorted(r.missing)
        for r in ranks
        if r.outcome == "timeout" and r.missing and r.flavour != "torch" and not r.lossy
    }
    if len({tuple(named) for named in verdicts.values()}) > 1:
        yield f"the ranks named different ranks as missing: {verdicts}"


def is_stall_report(event: dict[str, Any]) -> bool:
    """Return whether an event reports a blocked call.

    A call that a verdict covers has no `store.operation.stalled`.
    """
    return event["event"] in (names.OPERATION_STALLED, names.JOB_STALLED)


def events_of(record: RankRecord, name: str) -> list[dict[str, Any]]:
    """Return the events of a name."""
    return [event for event in record.events if event["event"] == name]
