"""The serving rank while it waits for its clients: who has not connected.

torch's server blocks in its constructor until ``world_size`` clients have joined. A
second client, which does not count as one that joined, registers this rank, publishes
what it waits for, and reads which ranks have registered.
"""

import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from tracedstore.common import ranges
from tracedstore.common.causes import REMEDIES, worst
from tracedstore.common.identity import host_name, restart_count
from tracedstore.common.threads import pause
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.ask.questions import ask_ranks
from tracedstore.diagnosis.connection.addresses import ConnectTarget, check_loopback
from tracedstore.diagnosis.connection.connection_attempt import (
    PHASE,
    ConnectionAttempt,
    count_joined,
)
from tracedstore.diagnosis.judgement import judge
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import MAX_AWAITED, AwaitedRank, Verdict
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.local.facts import LocalIdentity, ProcessFacts
from tracedstore.local.sockets import local_processes
from tracedstore.naming.decoders import auto, by_host, default_name, name_of

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
            answers, others = self._ask(absent), self._other_servers()
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
        """Return whether none of the ranks without an entry has joined."""
        return joined is not None and joined <= self._world_size - len(absent)

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
        if others:
            cause, evidence = "duplicate", (*others, *evidence)
        return Verdict(
            phase=PHASE,
            cause=cause,
            awaited=awaited,
            awaited_ranks=ranks,
            known=known,
            waiting_ranks=(self._rank,),
            evidence=evidence,
            # Without a name, ranks that never registered are all that is known.
            remedy=REMEDIES[cause if ranks or others else "not_started"],
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
            operation="connect",
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
        decoder = auto(os.environ)
        awaited = []
        for rank in sorted(ranks)[:MAX_AWAITED]:
            host = name_of(decoder, rank)
            host = "" if host == default_name(rank) else host
            awaited.append(judge.describe_rank(rank, answers.get(rank), None, host))
        return tuple(awaited)
