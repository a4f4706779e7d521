"""Connecting as a phase of a job: reports a store's constructor that does not return.

The spelling of the address is checked before torch connects. While the constructor
lasts, the watcher looks at it: on the serving rank, which ranks have not connected; on
the others, what a connection attempt of our own runs into. An exception of the
constructor gets the verdict as a note, and is otherwise unchanged.

torch's server blocks in its constructor until ``world_size`` clients have joined. A
second client, which does not count as one that joined, registers this rank, publishes
what it waits for, and reads which ranks have registered.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore

from tracedstore import names
from tracedstore.common import causes, ranges
from tracedstore.common.causes import REMEDIES, worst
from tracedstore.common.identity import host_name, restart_count
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.threads import pause, run_with_timeout, start_bounded_thread
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.ask.questions import ask_ranks
from tracedstore.diagnosis.connection import connection_attempt, file_store
from tracedstore.diagnosis.connection.addresses import ConnectTarget, check_loopback
from tracedstore.diagnosis.connection.connection_attempt import (
    PHASE,
    ConnectionAttempt,
    count_joined,
)
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import (
    MAX_AWAITED,
    AwaitedRank,
    Verdict,
    describe_rank,
    remedy_of,
    sources_of,
)
from tracedstore.diagnosis.observe import incarnations
from tracedstore.diagnosis.observe.blocked_record import (
    CONNECTS,
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.local.facts import LocalIdentity, ProcessFacts
from tracedstore.local.sockets import local_processes
from tracedstore.naming.decoders import auto, by_host, default_name, name_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER

_CONNECT_TIMEOUT = timedelta(seconds=2)
# Seconds between joining and registering, in which a rank wraps its store: how often to
# look for an entry, because a busy machine takes longer.
_REGISTRATION_DELAYS = (0.5, 0.5, 1.0)
# Seconds for the processes of absent ranks to answer.
_ANSWER_TIMEOUT = 2.0
# Entries that are read for the run ids of other jobs.
_MAX_ENTRIES_READ = 256
_MAX_HOSTS_SHOWN = 8
_MAX_SERVERS_SHOWN = 4
# Seconds for the processes of this host to answer who they are.
_LOCAL_TIMEOUT = 1.0
# torchrun's run id of jobs that were given none.
_NO_RUN_ID = "none"

# Seconds after which the serving rank publishes what it waits for.
_PUBLISH_AFTER = 1.0
# Seconds that a constructor which has ended waits for the last step of the diagnosis.
_END_TIMEOUT = 1.0

_guarded = partial(RECORDER.failures.guarded, names.DIAGNOSIS)
Answers = Mapping[int, ProcessFacts]


class ServerSide:
    """The second client of a serving rank.

    Its methods do I/O: call them in a bounded thread.
    """

    def __init__(self, target: ConnectTarget, started: float) -> None:
        self._target = target
        self._rank = target.rank or 0
        self._world_size = target.world_size or 0
        self._started = started
        self._client: Any = None
        self._lock = threading.Lock()
        self._published = self._withdrawn = False
        # The ranks that were started twice, in words.
        self._duplicates: list[str] = []

    def publish(self) -> set[int]:
        """Register this rank, publish its wait; return the ranks without an entry."""
        if self._client is None:
            # Not MASTER_ADDR, which may lead to another machine. Without a world size,
            # because a client with one counts as joined.
            client = TCPStore(
                "127.0.0.1",
                self._target.port,
                timeout=_CONNECT_TIMEOUT,
            )
            rank_registry.register_early(client, self._rank, self._world_size)
            self._client = client
        absent = self._absent()
        with self._lock:
            if not self._withdrawn:
                publish_blocked(
                    self._client, self._record(absent), first=not self._published
                )
                self._published = True
        return absent

    def verdict(
        self, attempt: ConnectionAttempt, waited_seconds: float
    ) -> Verdict | None:
        """Name the ranks that have not connected; None if all have."""
        answers: Answers = {}
        others: tuple[str, ...] = ()
        absent, joined = self._count(attempt)
        if joined is None or self._can_name(absent, joined):
            answers = self._ask(absent)
            others = (*self._other_servers(), *self._duplicates[:_MAX_SERVERS_SHOWN])
            # Asking takes seconds. A rank that has connected by now is not awaited.
            absent, joined = self._count(attempt)
        if not absent or (joined is not None and joined >= self._world_size):
            return None
        found = self._verdict(absent, joined, attempt, answers, others)
        found = replace(found, waited_seconds=waited_seconds)
        with self._lock:
            if not self._withdrawn:
                self._client.set(VERDICT, found.to_bytes())
        return found

    def _count(self, attempt: ConnectionAttempt) -> tuple[set[int], int | None]:
        """Return the ranks without an entry, and how many clients have joined.

        The clients are counted after the entries are read: a rank that joins in
        between is one that has joined and has no entry.
        """
        for wait in (*_REGISTRATION_DELAYS, 0.0):
            absent = self.publish()
            replaced = incarnations.read_replacements(self._client)
            self._duplicates = incarnations.duplicates_in(replaced)
            # It cannot be read if the protocol is another one. This rank has joined,
            # so 0 is not the count either: torch keeps it elsewhere.
            joined = count_joined(self._target.port) or None if attempt.joined else None
            if joined is None or self._can_name(absent, joined):
                break
            # They have not registered yet, or they are not traced.
            if not pause(wait):
                break
        return absent, joined

    def _can_name(self, absent: Collection[int], joined: int | None) -> bool:
        """Return whether none of the ranks without an entry has joined.

        Of a rank that was started twice both processes have joined, with one entry.
        """
        if joined is None:
            return False
        return joined - len(self._duplicates) <= self._world_size - len(absent)

    def withdraw(self) -> None:
        """Delete what was published: the wait has ended."""
        with self._lock:
            self._withdrawn = True
            if self._client is not None:
                withdraw_blocked(self._client, self._rank)
                self._client.delete_key(VERDICT)

    def _absent(self) -> set[int]:
        present = rank_registry.registered_ranks(self._client, self._world_size)
        return set(range(self._world_size)).difference(present)

    def _verdict(
        self,
        absent: Collection[int],
        joined: int | None,
        attempt: ConnectionAttempt,
        answers: Answers,
        others: tuple[str, ...],
    ) -> Verdict:
        ranks = tuple(sorted(absent))
        known = ""
        if not self._can_name(absent, joined):
            present = self._world_size - len(absent)
            # Some of them joined without an entry, so none of them can be named.
            count = "an unknown number" if joined is None else str(joined - present)
            known = (
                f"no entry in the store: {ranges.ranks_text(ranks)}, of which"
                f" {count} joined untraced"
            )
            ranks = ()
        evidence = self._evidence(absent, joined, attempt)
        awaited = self._awaited(ranks, answers)
        cause = worst(one.cause for one in awaited)
        evidence = (*evidence, *sources_of(awaited))
        # Without a name, ranks that never registered are all that is known.
        remedy = remedy_of(awaited) if ranks else REMEDIES["not_started"]
        if others:
            cause, evidence = "duplicate", (*others, *evidence)
            remedy = REMEDIES[cause]
        return Verdict(
            phase=PHASE,
            cause=cause,
            awaited=awaited,
            awaited_ranks=ranks,
            known=known,
            waiting_ranks=(self._rank,),
            evidence=evidence,
            remedy=remedy,
            time=time.time(),
        )

    def _evidence(
        self, absent: Collection[int], joined: int | None, attempt: ConnectionAttempt
    ) -> tuple[str, ...]:
        target, size = self._target, self._world_size
        registered = sorted(set(range(size)).difference(absent))
        count = "" if joined is None else f"{joined} of {size} clients joined; "
        entries = rank_registry.read_ranks(self._client, registered[:_MAX_ENTRIES_READ])
        hosts = by_host(entries, lambda rank: entries[rank].host)
        shown = "; ".join(
            f"{ranges.ranks_text(ranks)} on {host}"
            for host, ranks in list(hosts.items())[:_MAX_HOSTS_SHOWN]
        )
        if more := len(registered) - len(entries):
            shown += f"; {more} more ranks"
        evidence = [f"{count}registered at {target.server}: {shown}"]
        loopback = check_loopback(
            target.host_name, target.host, attempt.addresses, os.environ
        )
        if loopback is not None:
            evidence.append(loopback.finding)
        own = entries.get(self._rank)
        foreign = {
            info.run_id: info
            for info in entries.values()
            if own is not None and info.run_id != own.run_id
        }
        for run_id, info in sorted(foreign.items(), key=lambda item: item[1].rank)[:2]:
            evidence.append(
                f"rank {info.rank} (pid {info.pid} on {info.host}) belongs to run"
                f" {run_id!r}, not {own.run_id if own else None!r}: two jobs may share"
                " this store"
            )
        return tuple(evidence)

    def _other_servers(self) -> tuple[str, ...]:
        """Describe processes of this host that serve this job as the same rank.

        Each waits for the clients of the job at an address of its own. The run id
        identifies the job; without one, they may belong to two jobs.
        """
        own = LocalIdentity.own()
        if own.run_id in (None, _NO_RUN_ID):
            return ()
        found = [
            reply.identity
            for pid, reply in sorted(local_processes(_LOCAL_TIMEOUT).items())
            if reply is not None and pid != own.pid
        ]
        return tuple(
            f"rank {self._rank} of run {own.run_id!r} was started twice: pid {own.pid}"
            f" serves {self._target.server}, and pid {other.pid} serves {other.master}"
            for other in found
            # One that has registered has its clients.
            if replace(other, pid=0, start_ticks=None, master="")
            == replace(own, pid=0, start_ticks=None, master="")
            and not other.registered
            and other.master not in ("", own.master)
        )[:_MAX_SERVERS_SHOWN]

    def _record(self, absent: Collection[int]) -> BlockedRecord:
        return BlockedRecord(
            rank=self._rank,
            host=host_name(),
            pid=os.getpid(),
            attempt=restart_count(os.environ),
            operation=CONNECTS,
            keys=(),
            phase=PHASE,
            awaits=tuple(sorted(absent)),
            started=self._started,
        )

    def _ask(self, ranks: Collection[int]) -> Answers:
        """Ask the first absent ranks: some may have a process on this host."""
        first = sorted(ranks)[:MAX_AWAITED]
        return ask_ranks(self._client, {}, first, self._world_size, _ANSWER_TIMEOUT)

    def _awaited(
        self, ranks: Collection[int], answers: Answers
    ) -> tuple[AwaitedRank, ...]:
        """Describe the first absent ranks."""
        decoder, now = auto(os.environ), time.time()
        awaited = []
        for rank in sorted(ranks)[:MAX_AWAITED]:
            host = name_of(decoder, rank)
            host = "" if host == default_name(rank) else host
            awaited.append(describe_rank(rank, answers.get(rank), None, host, now))
        return tuple(awaited)


@contextmanager
def watched(target: ConnectTarget | None) -> Iterator[None]:
    """Diagnose a store's constructor that runs in this context.

    Args:
        target: Where it connects to; None if that is unknown, and nothing is done.
    """
    if target is None or not RECORDER.on:
        yield
        return
    if target.path:
        _guarded(_check_file, target)
        yield
        return
    phase = ConnectingPhase(target, RECORDER.overdue_ns / 1e9)
    _guarded(phase.start)
    try:
        yield
    except BaseException as error:
        # What a signal handler raises gets no note, and does not wait for a verdict.
        ended = phase.abandoned if raised_by_handler(error) else phase.failed
        _guarded(ended, error)
        raise
    _guarded(phase.returned)


def _check_file(target: ConnectTarget) -> None:
    """Report a file that an earlier run left, once per host and job."""
    try:
        verdict = run_with_timeout(
            _END_TIMEOUT,
            partial(file_store.check_earlier_run, target.path, target.rank),
        )
    except TimeoutError:
        return  # the file system does not answer; the store will not either
    if verdict is None:
        return
    # Kept until the process ends: the other ranks of the host may open the file later.
    what = f"{target.path}/{verdict.cause}"
    if not stall_reports.has_claim(what) and stall_reports.keep_claim(what):
        incarnations.report_stale(verdict.describe(), remedy=verdict.remedy)


class ConnectingPhase:
    """One call of a store's constructor, and the watch of it.

    It is no `Watch` with a method of this object: the two would refer to each other,
    and be left to garbage collection after every constructor.

    Args:
        target: Where it connects to.
        stall_after: Seconds after which it counts as stalled; infinity for never.

    Attributes:
        started: When the constructor began, by ``time.monotonic``.
        due: When the watcher calls `report` next.
    """

    observer = names.DIAGNOSIS

    def __init__(self, target: ConnectTarget, stall_after: float) -> None:
        self._target = target
        self._stall_after = stall_after
        # Early enough for the note of the exception at the timeout.
        self._look_after = min(stall_after, target.timeout / 2)
        first = self._look_after
        self._server: ServerSide | None = None
        # Agents do not register.
        if target.serving and not target.agents and (target.world_size or 0) > 1:
            self._server = ServerSide(target, time.time())
            first = min(first, _PUBLISH_AFTER)
        self._watched = math.isfinite(first)
        self.started = time.monotonic()
        self.due = self.started + first
        self._lock = threading.Lock()
        self._busy = False
        self._ended = False
        self._verdict: Verdict | None = None
        self._reported: Verdict | None = None
        self._claimed = ""
        # Another process of this host reports.
        self._left_to_other = False

    def start(self) -> None:
        """Check the spelling of the address, and watch the constructor."""
        defect = self._target.check_spelling()
        if defect is not None:
            self._verdict = connection_attempt.from_defect(self._target, defect)
            self._report_verdict()
        if self._watched:
            WATCHER.add(self)

    def abandoned(self, _error: BaseException) -> None:
        """Note that a signal handler has ended the constructor."""
        self._end()

    def failed(self, error: BaseException) -> None:
        """Add the verdict to the exception that ends the constructor."""
        verdict = self._end()
        # Nothing to withdraw: the server ended with the constructor.
        if not isinstance(error, Exception):
            return
        cause = causes.classify(error)
        if cause == causes.ADDRESS_IN_USE:
            verdict = run_with_timeout(
                _END_TIMEOUT, partial(connection_attempt.port_in_use, self._target)
            )
        elif verdict is None and self._target.serving:
            # It failed before the first look. Its server is gone, but not its address.
            with suppress(TimeoutError):
                verdict = run_with_timeout(_END_TIMEOUT, self._check_address)
        elif verdict is None:
            verdict = connection_attempt.verdict_on(
                self._target, self._reach_after(cause), self._waited()
            )
        if verdict is None:
            return
        self._verdict = replace(verdict, waited_seconds=self._waited())
        error.add_note(f"tracedstore: {self._verdict.describe()}")
        # The process that has the claim may have failed and ended a moment ago.
        due = math.isfinite(self._stall_after) and self._reported is None
        if due and not self._left_to_other:
            self._report_verdict()
        # The claim is kept: the constructors of the other ranks fail in a moment.
        stall_reports.failed(self)

    def returned(self) -> None:
        """Withdraw what was published: the constructor has returned."""
        self._end()
        if self._server is not None:
            with suppress(TimeoutError):
                run_with_timeout(_END_TIMEOUT, self._server.withdraw)
        if self._reported is not None:
            waited = self._waited()
            stall_reports.resumed(self, replace(self._reported, waited_seconds=waited))
        stall_reports.release_claim(self._claimed)

    def _reach_after(self, cause: str) -> connection_attempt.ConnectionAttempt:
        """Return what a connection attempt runs into after torch's have failed.

        Args:
            cause: What torch's exception says. It often has a text for all causes:
                "the client socket has timed out".
        """
        if cause in ("", causes.NO_ANSWER):
            cause = causes.UNKNOWN
        try:
            reached = run_with_timeout(
                _END_TIMEOUT, partial(connection_attempt.connect_once, self._target)
            )
        except TimeoutError:
            return connection_attempt.ConnectionAttempt(result=cause)
        if reached.result == connection_attempt.HUNG_UP:
            return replace(reached, result=causes.CONNECTION_LOST)
        return replace(reached, result=cause) if reached.answered else reached

    def _check_address(self) -> Verdict | None:
        defect = connection_attempt.connect_once(self._target, os.environ).defect
        return (
            None
            if defect is None
            else connection_attempt.from_defect(self._target, defect)
        )

    def _end(self) -> Verdict | None:
        WATCHER.remove(self)
        with self._lock:
            self._ended = True
            return self._verdict

    def _waited(self) -> float:
        return time.monotonic() - self.started

    # In the watcher's thread and in bounded threads.

    def report(self) -> float:
        """Start what is due; return the seconds until the next step."""
        waited = self._waited()
        with self._lock:
            busy, self._busy = self._busy, True
        if not busy:
            work = self._look if waited >= self._look_after else self._publish
            try:
                # The other watches must not wait for it.
                start_bounded_thread(partial(self._run, work))
            except RuntimeError:  # no thread now; the next step tries again
                self._busy = False
                raise
        points = (self._look_after, self._stall_after, 2 * waited)
        return min(point for point in points if point > waited) - waited

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, RuntimeError):
            # The store's: a server that ended, or has not begun to listen.
            return
        except Exception as error:
            RECORDER.failures.add(names.DIAGNOSIS, error)
        finally:
            with self._lock:
                self._busy = False

    def _publish(self) -> None:
        if self._server is not None:
            self._server.publish()

    def _look(self) -> None:
        reached = connection_attempt.connect_once(self._target, os.environ)
        found = connection_attempt.verdict_on(self._target, reached, self._waited())
        if self._server is not None and reached.answered:
            found = self._server.verdict(reached, self._waited())
        with self._lock:
            if self._ended:
                return
            self._verdict = found
        if self._waited() >= self._stall_after:
            self._report_verdict()
        elif found is not None and self._server is None:
            self._take_claim(found)

    def _report_verdict(self) -> None:
        verdict = self._verdict
        if verdict is None:
            return
        if self._server is None and not self._take_claim(verdict):
            return
        self._reported = verdict
        stall_reports.report(self, verdict, self._target.url)

    def _take_claim(self, verdict: Verdict) -> bool:
        """Return whether this process reports, of those of its host.

        The ranks that cannot connect share no store, and a host may have many.
        """
        what = self._claimed or f"{self._target.server}/{verdict.cause}"
        self._left_to_other = not stall_reports.keep_claim(what)
        self._claimed = "" if self._left_to_other else what
        return not self._left_to_other
