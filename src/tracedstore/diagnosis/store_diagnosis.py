"""The diagnosis of one store: what waits in it, what is published there, and verdicts.

There is one object for each store and rank of this process. It has its own connections,
and one thread at a time works in it (`service`). So a store that hangs, or refuses
connections, holds up nothing but itself.

Each round of a wait publishes what is waited for, and reads or finds a verdict.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import ref

from torch.distributed import DistError

from tracedstore.common import election
from tracedstore.common.identity import bottom_of, number, process_identity
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import Member
from tracedstore.coordination.store_access import (
    bare_store,
    connector,
    is_one_connection,
    read_key,
)
from tracedstore.diagnosis.ask.questions import (
    MAX_POLLING_RANKS,
    Allowance,
    polling_interval_of_rank,
)
from tracedstore.diagnosis.ask.responder import Responder
from tracedstore.diagnosis.connection.connection_attempt import probe_server
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.inquiry import inquire, still_holds
from tracedstore.diagnosis.judgement.stall_reports import LOOKERS, VERDICT
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import (
    blocked_calls,
    is_described_completely,
    waited_seconds,
)
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.diagnosis.observe.incarnations import check_earlier, check_replaced
from tracedstore.diagnosis.observe.waits import Pending, PendingCall, PendingPoll
from tracedstore.diagnosis.rounds import Wait
from tracedstore.local.facts import store_url
from tracedstore.local.sockets import host_has_agent
from tracedstore.naming import decoders
from tracedstore.recording.counters import (
    STORES,
    StoreState,
    handle_of,
    store_of,
)
from tracedstore.recording.recorder import Recorder

# The number of verdicts so far: each round of looking has a counter of its own.
_VERDICT_COUNT: Final = "tracedstore/VERDICTS"
# Seconds between two looks at the calls in flight.
_INTERVAL: Final = 1.0
# Seconds from publishing a record to looking: the records of the other ranks arrive.
_SETTLE: Final = 1.5
# Seconds from the begin of a round in which a suspect that is in a Store call may
# publish its record: on a busy machine that takes longer than `_SETTLE`.
_RECORDS_TIMEOUT = 4.0
# Seconds after which further ranks look, because those that did have published nothing.
_VERDICT_TIMEOUT: Final = 6.0
# Seconds for processes to answer: while a call waits, whatever its timeout, because a
# busy machine takes as long for a short call; and while a call that has timed out waits
# for the verdict. What was asked before that is judged by the answers so far.
_ANSWER_TIMEOUT: Final = 3.0
_ANSWER_TIMEOUT_AT_ONCE: Final = 0.2
# Seconds before a call times out in which no answers are awaited any more, so that its
# verdict is ready: at most, and as a share of its timeout.
_RESERVE, _RESERVED_SHARE = 1.0, 0.1
# Ranks up to which each reads the store once in an interval; with more, less often.
_RANKS_PER_INTERVAL: Final = 2048
# Seconds for the agent of this host to answer, once per store of a large job.
_AGENT_TIMEOUT: Final = 1.0
# Seconds from a failed read of questions, or a failed registration, to the next one.
_RETRY_AFTER: Final = 30.0
# Seconds after which a process has outlived the failure of its call: a wait that it
# repeats has been published by then in most cases, and no request is needed.
_OUTLIVED = 15.0
# Seconds by which the clocks of two hosts may differ.
_CLOCK_TOLERANCE: Final = 60.0
# What a store raises whose server cannot be reached, or that was freed.
STORE_ERRORS: Final = (OSError, DistError, ReferenceError)


class StoreDiagnosis:
    """One rank of this process in one store, seen by the diagnosis.

    It refers to the store weakly: a store that is kept keeps its server and its port.

    Args:
        handle: The handle of the store.
        member: The rank.
        recorder: What records the calls.
        stall_after: Seconds after which a wait is reported.
        answers: Whether this process answers questions.

    Attributes:
        member: The rank.
        worker: The identity of the thread that works in it, None while none does.
        busy_since: When that began or last got an answer, by ``time.monotonic``.
        is_registered: The rank has an entry in the store, or needs none.
    """

    def __init__(
        self,
        handle: Any,
        member: Member,
        recorder: Recorder,
        stall_after: float,
        *,
        answers: bool,
    ) -> None:
        self.member = member
        self.worker: int | None = None
        self.busy_since = 0.0
        self.is_registered = True
        self._recorder = recorder
        self._stall_after = stall_after
        self._settle = min(_SETTLE, stall_after / 2)
        # Seconds between two looks of a rank that does not look itself.
        self._interval = step_interval(stall_after) * max(
            1.0, member.world_size / _RANKS_PER_INTERVAL
        )
        # The wait that the published record is about.
        self._leading: Wait | None = None
        self._handle = ref(handle)
        # A clone, where the store itself cannot be used.
        self._clone: Any = None
        # The store of a blocked call, where it is another one, and its clone.
        self._call_state: ref[Any] = ref(handle)
        self._call_clone: Any = None
        self._published = False
        # What the record of a blocked call was published through. Kept until that is
        # withdrawn, which is after the call: the store may be freed then.
        self._published_through: Any = None
        # When to withdraw the record of a failed call, by ``time.monotonic``.
        self._withdraw_at: float | None = None
        self._poll_at = 0.0
        # When to try to register, by the same clock.
        self._register_at = 0.0
        self._responder: Responder | None = None
        self._allowance = Allowance(member.world_size)
        # Another one: questions without end do not keep a rank from its verdict.
        self._verdict_allowance = Allowance(member.world_size)
        # Seconds between two reads of questions; None if another process answers.
        self._poll_interval = _poll_interval(member) if answers else None

    @property
    def handle(self) -> Any:
        """The handle of the store; None if it was freed."""
        return self._handle()

    @property
    def connection(self) -> Any:
        """A connection that no other thread uses.

        Raises:
            OSError: The server of the store cannot be reached.
            ReferenceError: The store was freed.
        """
        if self._clone is not None:
            return self._clone
        self._clone = _connect(self._handle())
        return _existing(self._handle()) if self._clone is None else self._clone

    def connection_to(self, state: StoreState) -> Any:
        """Return a connection to the store of a call.

        Its keys may have other prefixes than those of the store in which this rank
        registered.

        Raises:
            OSError: The server of the store cannot be reached.
            ReferenceError: The store was freed.
        """
        if state is self._handle():
            return self.connection
        if self._call_state() is not state:
            self._call_clone = _connect(state)
            self._call_state = ref(state)
        return _existing(state) if self._call_clone is None else self._call_clone

    def is_busy_for(self, seconds: float) -> bool:
        """Return whether a thread gets no answer from the store for so long."""
        return self.worker is not None and time.monotonic() - self.busy_since > seconds

    def expects_verdict(self, wait: Wait) -> bool:
        """Return whether a wait without a verdict is about to get one."""
        # Ranks of a large job read the verdict less often.
        late = _VERDICT_TIMEOUT + 2 * (
            self._interval - step_interval(self._stall_after)
        )
        return wait.record is not None and wait.looking() < late

    # A step of a wait, in the thread that works in this store.

    def advance(self, wait: Wait, *, at_once: bool = False) -> None:
        """Take the next step towards a verdict on a wait.

        Args:
            wait: The wait.
            at_once: Its call has just timed out, and its caller waits for the verdict.
        """
        self._register()
        now, waited = time.monotonic(), wait.repeated.waited()
        # The record as of this step, if it has everything that the call waits for.
        fresh: BlockedRecord | None = None
        if not wait.current and (now >= wait.refresh_at or at_once):
            self._publish(wait, now)
            if is_described_completely(wait.record, self.member):
                fresh = wait.record
            wait.refresh_at = now + self._interval
        elif wait.is_to_look_again(now, self._stall_after):
            wait.begin_round()
        if at_once and wait.record is not None:
            # First: when the caller has the exception, the process may end.
            self._mark_failed(wait)
        if wait.record is None or (now < wait.look_at and not at_once):
            return
        if at_once and wait.current and not self._holds(wait, wait.verdict):
            wait.discard_verdict()
        if not wait.current:
            self._look(wait, fresh, now, waited, at_once=at_once)
        # A call that has timed out is reported by the thread that made it.
        if wait.current and waited >= self._stall_after and not at_once:
            # The next round is when the wait has doubled.
            wait.look_at = now + waited
            wait.reported = True
            if wait.elected:
                self._report_if_held(wait)

    def _report_if_held(self, wait: Wait) -> None:
        if not self._holds(wait, wait.verdict):
            wait.discard_verdict()
        # Of two ranks that found it at the same time, one has its verdict in the store.
        elif self._is_replaced(wait):
            wait.elected = False
        else:
            self.report(wait)

    def _is_replaced(self, wait: Wait) -> bool:
        """Return whether another rank has published a verdict on a wait since."""
        if wait.record is None or wait.verdict is None:
            return False
        record = _about(wait.record, wait.verdict)
        published = self.read_verdict(record, wait.verdict.time)
        return published is not None and published.time > wait.verdict.time

    @property
    def is_to_register(self) -> bool:
        """Whether the rank has no entry in the store, and may get one now."""
        return not self.is_registered and time.monotonic() >= self._register_at

    def register(self) -> None:
        """Register the rank, unless that failed lately."""
        if self.is_to_register:
            self._register_at = time.monotonic() + _RETRY_AFTER
            self._register()

    def _register(self) -> None:
        if self.is_registered:
            return
        handle = self._handle()
        if getattr(handle, "inner", None) is not None:
            rank_registry.register(
                handle,
                self.member.rank,
                self.member.world_size,
                connection=self.connection,
                check=check_earlier,
            )
        self.is_registered = True

    def _publish(self, wait: Wait, now: float) -> None:
        before = wait.record
        waited = wait.repeated.waited()
        started = time.time() - waited if before is None else before.started
        record = self._describe(wait, started)
        if record == before and not (self.is_marked and self._leading is wait):
            return
        wait.record = record
        if record is None:
            # The keys exist now: the call returns.
            self._withdraw_of(wait)
            return
        leading = self._leading
        # A call that has failed, and may be repeated, does not hold up another one.
        if leading is None or leading is wait or leading.pending is None:
            self._leading = wait
            self.publish(record)
        if before is None:
            wait.look_at = now + self._settle
            wait.round_started = time.time()

    def _look(
        self,
        wait: Wait,
        fresh: BlockedRecord | None,
        now: float,
        waited: float,
        *,
        at_once: bool,
    ) -> None:
        """Read the verdict of another rank, or find one if this rank is elected."""
        record = wait.record
        if record is None:
            return
        if self._accept_published(wait, record, waited, fresh):
            return
        # The records of ten thousand ranks take seconds to read.
        late = (_VERDICT_TIMEOUT + self._interval) * wait.allowed / election.REPORTERS
        if not wait.order and wait.looking() >= 0:
            wait.order = self._take_order()
        elif wait.looking() > late:
            wait.allowed += election.REPORTERS
        wait.elected = election.is_elected(wait.order, wait.allowed)
        if not (wait.elected or at_once):
            wait.look_at = now + self._interval
            return
        verdict = self.find_verdict(wait, fresh, at_once=at_once)
        if verdict is None:
            wait.fruitless += 1
            wait.look_at = now + step_interval(self._stall_after)
        # Another rank may have found one while this one asked.
        elif at_once or not self._accept_published(
            wait, _about(record, verdict), waited
        ):
            wait.accept(verdict)
            self.publish_verdict(verdict)

    def find_verdict(
        self, wait: Wait, fresh: BlockedRecord | None = None, *, at_once: bool = False
    ) -> Verdict | None:
        """Find out whom a wait is for, as `inquire`; None to look again.

        Args:
            wait: The wait.
            fresh: The record of its call as of now, if that has everything.
            at_once: As of `advance`.
        """
        if wait.record is None:
            return None
        return inquire(
            self.connection,
            self.member,
            _ANSWER_TIMEOUT_AT_ONCE if at_once else _ANSWER_TIMEOUT,
            call_connection=self._connection_of(wait),
            own=fresh,
            describe=partial(self._describe, wait, wait.record.started, complete=True),
            records_until=wait.round_started + _RECORDS_TIMEOUT,
            hurry=partial(self._is_ending, wait),
            fruitless=wait.fruitless,
        )

    def lasts(self, wait: Wait) -> bool:
        """Return whether something still keeps the call of a wait, and it is in it."""
        if wait.record is None or (wait.pending is not None and wait.pending.failed):
            return False
        record = self._describe(wait, wait.record.started)
        return record is not None and not self._has_ended(wait)

    def _accept_published(
        self,
        wait: Wait,
        record: BlockedRecord,
        waited: float,
        fresh: BlockedRecord | None = None,
    ) -> bool:
        """Take the verdict of another rank, which reports it; return whether one holds.

        Any client can write one. In a large job all ranks would read all records.
        """
        # Ranks look at different times: a verdict holds until the wait nearly doubled.
        since = time.time() - max(self._settle, waited / 2)
        since = max(since, record.started, wait.valid_from)
        published = self.read_verdict(record, since)
        large = self.member.world_size > MAX_POLLING_RANKS
        if published is None or not (large or self._holds(wait, published, fresh)):
            return False
        wait.accept(published)
        wait.elected = False
        return True

    def _is_ending(self, wait: Wait) -> bool:
        """Return whether a call is about to time out, or not in flight any more."""
        pending = wait.pending
        if not isinstance(pending, PendingCall):
            return pending is None
        reserve = min(_RESERVE, _RESERVED_SHARE * pending.timeout)
        waited = waited_seconds(self._recorder, pending.active)
        if pending.timeout > 0 and pending.timeout - waited < reserve:
            return True
        return self._has_ended(wait)

    def _has_ended(self, wait: Wait) -> bool:
        """Return whether the Store call of a wait is not in flight any more."""
        pending = wait.pending
        if not isinstance(pending, PendingCall):
            return pending is None
        call = pending.active.call
        return all(one.call is not call for one in blocked_calls(self._recorder))

    def _describe(
        self,
        wait: Wait,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return what a rank waits for now; None if nothing keeps it any more.

        It is progress: a store that is slow, but responds, is not reported.
        """
        if wait.pending is None:
            return None  # its call has ended
        self.busy_since = time.monotonic()
        record = wait.pending.describe(
            self._connection_of(wait),
            self.member,
            started,
            complete=complete,
            also=also,
        )
        self.busy_since = time.monotonic()
        return record

    def _connection_of(self, wait: Wait) -> Any:
        """Return a connection to the store whose keys a rank waits for."""
        if wait.pending is None or wait.pending.state is None:
            return self.connection
        return self.connection_to(wait.pending.state)

    def _holds(
        self, wait: Wait, verdict: Verdict | None, fresh: BlockedRecord | None = None
    ) -> bool:
        """Return whether all ranks that a verdict names are awaited now.

        All ranks do this when their calls time out, so only these ranks are checked.
        """
        if wait.record is None or verdict is None:
            return False
        record = fresh
        if record is None:
            named = verdict.awaited_ranks
            record = self._describe(wait, wait.record.started, also=named)
        if record is None:
            return False  # the keys exist now
        return still_holds(self.connection, record, self.member, verdict)

    # The end of a wait, and its report; also in the thread that made the call.

    def report(self, wait: Wait) -> None:
        """Report the verdict on a wait; the event, if it is due.

        It is not before `stall_after`: a call may time out sooner, and be repeated.
        """
        if wait.verdict is None or wait.repeated.waited() < self._stall_after:
            return
        waited = replace(wait.verdict, waited_seconds=wait.repeated.waited())
        url = store_url(self.handle)
        stall_reports.report(wait, waited, url, emit=wait.repeated.is_due())

    def resumed(self, wait: Wait) -> None:
        """Report that a wait is over, if it was reported."""
        stall_reports.release_claim(wait.claimed)
        if wait.verdict is not None:
            waited = wait.repeated.waited()
            ended = replace(wait.verdict, waited_seconds=waited)
            stall_reports.resumed(wait, ended)

    def pause(self, wait: Wait) -> None:
        """Mark what was published about a call that has failed.

        If the process ends because of that, the record stays: its rank waited for
        others until then. A process that does not end withdraws it later.
        """
        # The store of the call may be freed from now on.
        wait.pending = None
        with suppress(*STORE_ERRORS):
            self._mark_failed(wait)

    def end(self, wait: Wait, *, superseded: bool = False) -> None:
        """Withdraw what was published about a wait that has ended.

        Args:
            wait: The wait.
            superseded: It lasts, but another one is the wait of the rank.
        """
        # The store may be gone; that the call has ended is reported all the same.
        with suppress(*STORE_ERRORS):
            if wait.failed:
                self._mark_failed(wait)
            else:
                self._withdraw_of(wait)
        if self._leading is wait:
            self._leading = None
        if wait.failed or superseded:
            stall_reports.failed(wait)
        else:
            self.resumed(wait)

    # What is published in the store, and read from it.

    def publish(self, record: BlockedRecord) -> None:
        """Publish the record of a blocked call of this rank."""
        connection = self.connection
        if not self._published and self.member.agents is None:
            check_replaced(connection, self.member.rank, self.member.world_size)
        publish_blocked(connection, record, first=not self._published)
        self._published = True
        self._published_through = connection
        self._withdraw_at = None

    def _mark_failed(self, wait: Wait) -> None:
        """Mark the record of a call that has failed, once."""
        if self._withdraw_at is not None or wait.record is None:
            return
        if self._leading is not wait:
            return  # the record is about another wait of the rank
        connection = self._published_through or self.connection
        marked = replace(wait.record, failed=time.time())
        publish_blocked(connection, marked, first=False)
        # The store itself is not kept for so long.
        self._published_through = self._clone
        self._withdraw_at = time.monotonic() + _OUTLIVED

    @property
    def is_marked(self) -> bool:
        """Whether the record of a failed call is to be withdrawn later."""
        return self._withdraw_at is not None

    def _withdraw_of(self, wait: Wait) -> None:
        if self._leading is wait:
            self._leading = None
            self.withdraw()

    def withdraw(self) -> None:
        """Withdraw the record of this rank."""
        connection, self._published_through = self._published_through, None
        self._withdraw_at = None
        if connection is None:
            connection = self.connection
        withdraw_blocked(connection, self.member.rank)

    def _take_order(self) -> int:
        """Return the position of this process among those that look, from 1."""
        # add() with 0 reads a counter on every store.
        number = self.connection.add(_VERDICT_COUNT, 0)
        return election.take_position(self.connection, f"{LOOKERS}/{number}")

    def read_verdict(self, record: BlockedRecord, since: float) -> Verdict | None:
        """Return the latest verdict if it covers a blocked call of this rank."""
        allowance = self._verdict_allowance
        if allowance.is_spent or not self.connection.check([VERDICT]):
            return None
        value = read_key(self.connection, VERDICT)
        allowance.spend_bytes(len(value))
        verdict = Verdict.from_bytes(value, self.member.world_size)
        until = time.time() + _CLOCK_TOLERANCE
        if verdict is None or not since <= verdict.time < until:
            return None
        if record.awaits is None:
            return verdict if verdict.phase == record.phase else None
        # A rank that this one waits for is awaited, or waits for one that is.
        known = {*verdict.awaited_ranks, *verdict.waiting_ranks}
        return verdict if known.issuperset(record.awaits) else None

    def publish_verdict(self, verdict: Verdict) -> None:
        """Publish a verdict for the other ranks and for ``tracedstore status``."""
        self.connection.set(VERDICT, verdict.to_bytes())
        self.connection.add(_VERDICT_COUNT, 1)

    def withdraw_outlived(self) -> None:
        """Withdraw the record of a failed call that this process has outlived."""
        if self._withdraw_at is not None and time.monotonic() >= self._withdraw_at:
            self.withdraw()

    def poll(self) -> None:
        """Answer the questions of other processes, if it is time to look for some."""
        now = time.monotonic()
        if self._poll_interval is None or now < self._poll_at:
            return
        self._poll_at = now + self._poll_interval
        try:
            if self._responder is None:
                self._responder = Responder(
                    self.member.rank,
                    self.member.world_size,
                    allowance=self._allowance,
                )
            self._responder.poll(self.connection)
        except STORE_ERRORS:
            # At the end of a job its server ends first: that is no failure.
            self._clone = self._responder = None
            self._poll_at = now + _RETRY_AFTER


def _about(record: BlockedRecord, verdict: Verdict) -> BlockedRecord:
    """Return a record without the ranks that have come since it was published."""
    return replace(record, awaits=verdict.awaited_ranks or record.awaits)


class StoreDiagnoses:
    """The stores that this process diagnoses, by store and rank."""

    def __init__(
        self, recorder: Recorder, stall_after: float, *, answers: bool
    ) -> None:
        self._recorder = recorder
        self._stall_after = stall_after
        self._answers = answers
        # By handle and rank.
        self._by_store: WeakTable[dict[int, StoreDiagnosis]] = WeakTable()

    def of_pending(self, pending: Pending) -> StoreDiagnosis | None:
        """Return the diagnosis of what a rank waits in; None without a rank."""
        if pending.state is not None:
            return self.of(pending.state, pending.thread_id)
        store = pending.store if isinstance(pending, PendingPoll) else None
        for handle, _ in rank_registry.registrations():
            state = _state_of(handle)
            if state is not None and state.identity == store:
                return self.of(state, pending.thread_id)
        return None

    def of(self, state: StoreState, thread_id: int) -> StoreDiagnosis | None:
        """Return the diagnosis of a thread's rank and a store; None without a rank.

        A process that has not registered is registered in the first step, if the
        environment has its rank.
        """
        for handle, own in rank_registry.recorded_agents():
            if _state_of(handle) is state:
                return self._diagnosis(handle, own.rank, own.world_size)
        for handle, known in rank_registry.registrations():
            if not _is_store_of(state, handle):
                continue
            rank = rank_registry.rank_of_thread(handle, thread_id)
            if rank is not None:
                return self._diagnosis(handle, rank, known[rank].world_size)
        identity = process_identity()
        rank, world_size = identity.rank, identity.world_size
        if rank is None or world_size is None or not rank < world_size:
            return None
        found = self._diagnosis(state, rank, world_size)
        found.is_registered = rank_registry.is_registered(state, rank)
        return found

    def of_job(self) -> StoreDiagnosis | None:
        """Return that of the store in which the ranks of the job have registered.

        Of several stores, that is the one of all ranks; else the first.
        """
        identity = process_identity()
        found = [one for one in self.registered() if one.member.agents is None]
        found.sort(
            key=lambda one: (
                (one.member.rank, one.member.world_size)
                != (identity.rank, identity.world_size)
            )
        )
        return found[0] if found else None

    def unregistered(self) -> list[StoreDiagnosis]:
        """Return the stores in which the rank of this process has not registered.

        A rank that uses a store has started, though nothing told this package its rank
        but the environment, or torch.
        """
        if any(len(known) > 1 for _, known in rank_registry.registrations()):
            return []  # ranks are threads of this process, and register by themselves
        found = [
            self.of(state, 0)
            for state, _ in STORES.items()
            if state.below is None
            and state.original() is None
            and not state.identity.in_process
            and rank_registry.agent_in(state) is None
        ]
        return [one for one in found if one is not None and one.is_to_register]

    def registered(self) -> list[StoreDiagnosis]:
        """Return those of the stores in which this process has registered."""
        self._by_store.drop_dead()
        return [
            self._diagnosis(handle, rank, known[rank].world_size)
            for handle, known in rank_registry.registrations()
            for rank in (min(known),)
        ]

    def _diagnosis(self, handle: Any, rank: int, world_size: int) -> StoreDiagnosis:
        of_store = self._by_store.setdefault(handle, {})
        found = of_store.get(rank)
        if found is None or found.member.world_size != world_size:
            of_store.pop(rank, None)
            found = StoreDiagnosis(
                handle,
                _member(handle, rank, world_size),
                self._recorder,
                self._stall_after,
                answers=self._answers,
            )
            # The watcher may have made one meanwhile.
            found = of_store.setdefault(rank, found)
        return found


def step_interval(stall_after: float) -> float:
    """Return the seconds between two looks at the calls in flight."""
    return min(_INTERVAL, stall_after / 4)


def _poll_interval(member: Member) -> float | None:
    if member.agents is not None:
        return None  # agents answer in the store of their workers
    return polling_interval_of_rank(
        member.world_size,
        process_identity().local_rank,
        number(os.environ.get("LOCAL_WORLD_SIZE")),
        # An agent that is not traced answers no questions.
        has_agent=member.world_size > MAX_POLLING_RANKS
        and host_has_agent(_AGENT_TIMEOUT),
    )


def _member(handle: Any, rank: int, world_size: int) -> Member:
    agent = rank_registry.agent_in(handle)
    if agent is not None:
        return agent
    roster = decoders.auto()

    def host_of(rank: int) -> str:
        name = decoders.name_of(roster, rank)
        return "" if name == decoders.default_name(rank) else name

    return Member(rank=rank, world_size=world_size, host_of=host_of)


def _connect(handle: Any) -> Any:
    """Return a connection to use while another thread waits on the store of a handle.

    None for a store that can be used itself.

    Raises:
        OSError: The server of the store cannot be reached.
        ReferenceError: The store was freed.
    """
    store = _existing(handle)
    if not is_one_connection(store):
        return None
    bare, connect = bare_store(store), connector(store)
    address = (bare.host, bare.port) if hasattr(bare, "port") else None
    # The job may free it while this connects, and its server with it.
    del handle, store, bare
    # torch would try again for seconds, and log it.
    if address is not None and (cause := probe_server(*address)):
        raise ConnectionError(f"{address[0]}:{address[1]}: {cause}")
    return connect()


def _is_store_of(called: StoreState, handle: Any) -> bool:
    """Return whether the store that was called is that of a handle, or its clone."""
    state = _state_of(handle)
    if state is None or state is called:
        return state is called
    return state.identity == called.identity and not state.identity.in_process


def _state_of(handle: Any) -> StoreState | None:
    bottom = handle_of(bottom_of(handle))
    return bottom if isinstance(bottom, StoreState) else None


def _existing(handle: Any) -> Any:
    """Return the store of a handle.

    Raises:
        ReferenceError: It was freed.
    """
    store = None if handle is None else store_of(handle)
    if store is None:
        raise ReferenceError("the store was freed")
    return store
