"""The diagnosis of one store: what waits in it, what is published there, and verdicts.

There is one object for each store and rank of this process. It has its own connections,
and one thread at a time works in it (`service`). So a store that hangs, or refuses
connections, holds up nothing but itself.

A blocked call goes through rounds. In a round this process publishes what the call
waits for, and reads the verdict of another process or finds one if it is elected. The
next round begins when the wait has doubled.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
    answer_timeout,
    describe_call,
    is_described_completely,
    timeout_of,
    waited_seconds,
)
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.diagnosis.observe.incarnations import check_replaced
from tracedstore.local.sockets import host_has_agent
from tracedstore.naming import decoders
from tracedstore.recording.counters import ActiveCall, StoreState, handle_of, store_of
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
# Seconds for processes to answer while a call that has timed out waits for the verdict.
_ANSWER_TIMEOUT_AT_ONCE: Final = 0.2
# Ranks up to which each reads the store once in an interval; with more, less often.
_RANKS_PER_INTERVAL: Final = 2048
# Seconds for the agent of this host to answer, once per store of a large job.
_AGENT_TIMEOUT: Final = 1.0
# Seconds from a failed read of questions to the next one.
_RETRY_AFTER: Final = 30.0
# Seconds after which a process has outlived the failure of its call: a wait that it
# repeats has been published by then in most cases, and no request is needed.
_OUTLIVED = 15.0
# Seconds by which the clocks of two hosts may differ.
_CLOCK_TOLERANCE: Final = 60.0
# Seconds within which a call that timed out is repeated. A busy machine may take some.
_PAUSE = 5.0
_MAX_PHASES: Final = 64
# Less than 1, because the caller has measured the same wait a moment before.
_DOUBLED: Final = 0.9
# What a store raises whose server cannot be reached, or that was freed.
STORE_ERRORS: Final = (OSError, DistError, ReferenceError)


@dataclass(slots=True, eq=False)
class Wait:
    """A blocked call that is being examined.

    Attributes:
        active: The call.
        store: The diagnosis of its store.
        record: What this process has published about it.
        verdict: Whom it waits for, by the latest verdict.
        current: The verdict is of the current round of looking.
        refuted: A rank that the verdict names has arrived since.
        look_at: When to look next, by ``time.monotonic``.
        refresh_at: When to check next what it waits for, by the same clock.
        round_started: When the current round of looking began, since the epoch.
        order: The position of this process among those that look in this round; 0
            before it took one.
        allowed: How many of them may look.
        elected: This process found the verdict, and reports it.
        reported: It has reported it.
        failed: The call has raised.
        seen_ended: The call was not in flight any more at the last look.
        valid_from: When the verdict was last discarded, since the epoch: one that was
            found before does not hold any more.
        claimed: The claim under which it was reported for this host, "" without one.
    """

    active: ActiveCall
    store: "StoreDiagnosis"
    record: BlockedRecord | None = None
    verdict: Verdict | None = None
    current: bool = False
    refuted: bool = False
    look_at: float = 0.0
    refresh_at: float = 0.0
    round_started: float = field(default_factory=time.time)
    order: int = 0
    allowed: int = election.REPORTERS
    elected: bool = False
    reported: bool = False
    failed: bool = False
    seen_ended: bool = False
    valid_from: float = 0.0
    claimed: str = ""

    def looking(self) -> float:
        """Return the seconds since the current round of looking began."""
        return time.time() - self.round_started

    def begin_round(self) -> None:
        """Look again."""
        self.current = self.elected = self.reported = False
        self.order, self.allowed = 0, election.REPORTERS
        self.round_started = time.time()

    def accept(self, verdict: Verdict) -> None:
        """Take a verdict of the current round."""
        self.verdict, self.current, self.refuted = verdict, True, False

    def discard_verdict(self) -> None:
        """Look again at once: a rank that the verdict names has arrived.

        The verdict stays: it may have been reported, and its end is reported too.
        """
        self.current = self.reported = False
        self.refuted = True
        self.look_at = 0.0
        self.valid_from = time.time()


@dataclass(slots=True)
class _Repeated:
    """Calls in one phase that follow each other.

    Attributes:
        since: When the first one began, by ``time.monotonic``.
        ends_at: When the latest one times out, by the same clock.
        report_at: When the next report is due, by the same clock.
    """

    since: float
    ends_at: float
    report_at: float


class Repeats:
    """Finds waits that a program repeats as soon as they have timed out.

    torch does so every 10 s in its barrier after the creation of a process group. Such
    waits are one wait, which is reported again each time it has doubled.
    """

    def __init__(self) -> None:
        # By store and phase.
        self._by_phase: dict[tuple[int, str], _Repeated] = {}
        # A call that has timed out is reported for the thread that made it, by another
        # thread than the diagnosis'.
        self._lock = threading.RLock()

    def is_due(self, wait: Wait, waited: float) -> bool:
        """Return whether a report on a wait is due; if so, it is taken as made.

        Args:
            wait: The wait; the caller knows that it is due by itself.
            waited: How many seconds it has lasted.
        """
        with self._lock:
            return self._is_due(wait, waited)

    def _is_due(self, wait: Wait, waited: float) -> bool:
        now = time.monotonic()
        key = _phase_of(wait)
        known = self._by_phase.pop(key, None)
        if known is None or now - waited > known.ends_at:
            known = _Repeated(since=now - waited, ends_at=now, report_at=now)
        is_due = now >= known.report_at
        if is_due:
            known.report_at = now + _DOUBLED * (now - known.since)
        timeout = timeout_of(wait.active).total_seconds()
        known.ends_at = now + max(0.0, timeout - waited) + _PAUSE
        self._by_phase[key] = known
        if len(self._by_phase) > _MAX_PHASES:
            del self._by_phase[next(iter(self._by_phase))]
        return is_due

    def forget(self, wait: Wait) -> None:
        """Forget a wait that has returned."""
        self._by_phase.pop(_phase_of(wait), None)


def _phase_of(wait: Wait) -> tuple[int, str]:
    return id(wait.active.state), "" if wait.record is None else wait.record.phase


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
        self._repeats = Repeats()
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
        self._responder: Responder | None = None
        self._allowance = Allowance(member.world_size)
        # Another one: questions without end do not keep a rank from its verdict.
        self._verdict_allowance = Allowance(member.world_size)
        # Seconds between two reads of questions; None if another process answers.
        self._poll_interval = _poll_interval(member) if answers else None

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

    def advance(self, wait: Wait, waited: float, *, at_once: bool = False) -> None:
        """Take the next step towards a verdict on a call.

        Args:
            wait: The call.
            waited: How many seconds it has lasted.
            at_once: It has just timed out, and its caller waits for the verdict.
        """
        self._register()
        now = time.monotonic()
        # The record as of this step, if it has everything that the call waits for.
        fresh: BlockedRecord | None = None
        if not wait.current and (now >= wait.refresh_at or at_once):
            self._publish(wait, waited, now)
            if is_described_completely(wait.record, self.member):
                fresh = wait.record
            wait.refresh_at = now + self._interval
        elif now >= wait.look_at and wait.reported:
            wait.begin_round()
        if at_once and wait.record is not None:
            # First: when the caller has the exception, the process may end.
            self._mark_failed(wait.record)
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
        if self._holds(wait, wait.verdict):
            self.report(wait)
        else:
            wait.discard_verdict()

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
            )
        self.is_registered = True

    def _publish(self, wait: Wait, waited: float, now: float) -> None:
        before = wait.record
        started = time.time() - waited if before is None else before.started
        record = self._describe(wait, started)
        if record == before:
            return
        wait.record = record
        if record is None:
            # The keys exist now: the call returns.
            self.withdraw()
            return
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
        # Ranks look at different times: a verdict holds until the wait nearly doubled.
        since = time.time() - max(self._settle, waited / 2)
        since = max(since, record.started, wait.valid_from)
        published = self.read_verdict(record, since)
        # Any client can write one. In a large job all ranks would read all records.
        large = self.member.world_size > MAX_POLLING_RANKS
        if published and (large or self._holds(wait, published, fresh)):
            wait.accept(published)
            wait.elected = False  # the process that found it reports it
            return
        # The records of ten thousand ranks take seconds to read.
        late = (_VERDICT_TIMEOUT + self._interval) * wait.allowed / election.REPORTERS
        if not wait.order:
            wait.order = self._take_order()
        elif wait.looking() > late:
            wait.allowed += election.REPORTERS
        wait.elected = election.is_elected(wait.order, wait.allowed)
        if not (wait.elected or at_once):
            wait.look_at = now + self._interval
            return
        verdict = inquire(
            self.connection,
            self.member,
            _ANSWER_TIMEOUT_AT_ONCE if at_once else answer_timeout(wait.active),
            call_connection=self.connection_to(wait.active.state),
            own=fresh,
            describe=partial(self._describe, wait, record.started, complete=True),
            records_until=wait.round_started + _RECORDS_TIMEOUT,
        )
        if verdict is None:
            wait.look_at = now + step_interval(self._stall_after)
        else:
            wait.accept(verdict)
            self.publish_verdict(verdict)

    def _describe(
        self,
        wait: Wait,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return what a call waits for now, as `describe_call` does.

        It is progress: a store that is slow, but responds, is not reported.
        """
        self.busy_since = time.monotonic()
        connection = self.connection_to(wait.active.state)
        record = describe_call(
            connection,
            wait.active,
            self.member,
            started,
            complete=complete,
            also=also,
        )
        self.busy_since = time.monotonic()
        return record

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
        """Report the verdict on a wait; the event, if it is due."""
        if wait.verdict is not None:
            waited = waited_seconds(self._recorder, wait.active)
            emit = self._repeats.is_due(wait, waited)
            stall_reports.report(wait, wait.verdict, emit=emit)

    def resumed(self, wait: Wait) -> None:
        """Report that a call has returned, if its wait was reported."""
        self._repeats.forget(wait)
        stall_reports.release_claim(wait.claimed)
        if wait.verdict is not None:
            waited = waited_seconds(self._recorder, wait.active)
            ended = replace(wait.verdict, waited_seconds=waited)
            stall_reports.resumed(wait, ended)

    def end(self, wait: Wait) -> None:
        """Withdraw what was published about a call that has ended, or mark it.

        If the process ends because the call has failed, the record stays: its rank
        waited for others until then. A process that does not end withdraws it later.
        """
        # The store may be gone; that the call has ended is reported all the same.
        with suppress(*STORE_ERRORS):
            if wait.record is not None and wait.failed:
                self._mark_failed(wait.record)
            elif wait.record is not None:
                self.withdraw()
        if wait.failed:
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

    def _mark_failed(self, record: BlockedRecord) -> None:
        """Mark the record of a call that has failed, once."""
        if self._withdraw_at is not None:
            return
        connection = self._published_through or self.connection
        marked = replace(record, failed=time.time())
        publish_blocked(connection, marked, first=False)
        # The store itself is not kept for so long.
        self._published_through = self._clone
        self._withdraw_at = time.monotonic() + _OUTLIVED

    @property
    def is_marked(self) -> bool:
        """Whether the record of a failed call is to be withdrawn later."""
        return self._withdraw_at is not None

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

    def of(self, call: ActiveCall) -> StoreDiagnosis | None:
        """Return the diagnosis of a call's rank and store; None if its rank is unknown.

        A process that has not registered is registered in the first step, if the
        environment has its rank.
        """
        for handle, own in rank_registry.recorded_agents():
            if _state_of(handle) is call.state:
                return self._diagnosis(handle, own.rank, own.world_size)
        for handle, known in rank_registry.registrations():
            if not _is_store_of(call, handle):
                continue
            rank = rank_registry.rank_of_thread(handle, call.thread_id)
            if rank is not None:
                return self._diagnosis(handle, rank, known[rank].world_size)
        identity = process_identity()
        rank, world_size = identity.rank, identity.world_size
        if rank is None or world_size is None or not rank < world_size:
            return None
        found = self._diagnosis(call.state, rank, world_size)
        found.is_registered = rank_registry.is_registered(call.state, rank)
        return found

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


def _is_store_of(call: ActiveCall, handle: Any) -> bool:
    """Return whether a call is one of a store, or of a clone of it."""
    state = _state_of(handle)
    if state is None or state is call.state:
        return state is call.state
    return state.identity == call.state.identity and not state.identity.in_process


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
