"""A connection of the diagnosis to one store, and what it publishes there."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
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
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import describe_call
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.diagnosis.observe.incarnations import check_replaced
from tracedstore.local.sockets import host_has_agent
from tracedstore.naming import decoders
from tracedstore.recording.counters import ActiveCall, StoreState, handle_of, store_of

# The number of verdicts so far, and of the processes that looked for the next one.
_VERDICT_COUNT: Final = "tracedstore/VERDICTS"
_LOOKERS: Final = "tracedstore/DIAGNOSING"
# Seconds for the agent of this host to answer, once per store of a large job.
_AGENT_TIMEOUT: Final = 1.0
# Seconds from a failed read of questions to the next one.
_RETRY_AFTER: Final = 30.0
# Seconds after which a process has outlived the failure of its call: a wait that it
# repeats has been published by then in most cases, and no request is needed.
_OUTLIVED: Final = 15.0
# Seconds by which the clocks of two hosts may differ.
_CLOCK_TOLERANCE: Final = 60.0
# What a store raises whose server cannot be reached, or that was freed.
STORE_ERRORS: Final = (OSError, DistError, ReferenceError)


class Session:
    """One rank of this process in one store, seen by the diagnosis.

    It refers to the store weakly: a store that is kept keeps its server and its port.

    Args:
        handle: The handle of the store.
        member: The rank.
        answers: Whether this process answers questions.

    Attributes:
        member: The rank.
    """

    def __init__(self, handle: Any, member: Member, *, answers: bool) -> None:
        self.member = member
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
        self._marked = False
        self._poll_at = 0.0
        self._responder: Responder | None = None
        self._allowance = Allowance(member.world_size)
        # Another one: questions without end do not keep a rank from its verdict.
        self._verdict_allowance = Allowance(member.world_size)
        # Seconds between two reads of questions; None if another process answers.
        self._interval = _interval(member) if answers else None

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

    def describe(
        self,
        call: ActiveCall,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return what a blocked call waits for, as `describe_call` does."""
        return describe_call(
            self.connection_to(call.state),
            call,
            self.member,
            started,
            complete=complete,
            also=also,
        )

    def publish(self, record: BlockedRecord) -> None:
        """Publish the record of a blocked call of this rank."""
        connection = self.connection
        if not self._published and self.member.agents is None:
            check_replaced(connection, self.member.rank, self.member.world_size)
        publish_blocked(connection, record, first=not self._published)
        self._published = True
        self._published_through = connection
        self._marked = False

    def mark_failed(self, record: BlockedRecord) -> bool:
        """Mark the record of a call that has failed; return False if it is marked."""
        if self._marked:
            return False
        connection = self._published_through or self.connection
        marked = replace(record, failed=time.time())
        publish_blocked(connection, marked, first=False)
        # The store itself is not kept for so long.
        self._published_through = self._clone
        self._marked = True
        return True

    def withdraw_marked(self) -> None:
        """Withdraw the record of a failed call, unless there is a newer one."""
        if self._marked:
            self.withdraw()

    def withdraw(self) -> None:
        """Withdraw the record of this rank."""
        connection, self._published_through = self._published_through, None
        self._marked = False
        if connection is None:
            connection = self.connection
        withdraw_blocked(connection, self.member.rank)

    def take_order(self) -> int:
        """Return the position of this process among those that look, from 1."""
        # add() with 0 reads a counter on every store.
        number = self.connection.add(_VERDICT_COUNT, 0)
        return election.take_position(self.connection, f"{_LOOKERS}/{number}")

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

    def poll(self) -> None:
        """Answer the questions of other processes, if it is time to look for some."""
        now = time.monotonic()
        if self._interval is None or now < self._poll_at:
            return
        self._poll_at = now + self._interval
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


class Sessions:
    """The sessions of this process, one for each rank and store."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        # By handle and rank.
        self._by_store: WeakTable[dict[int, Session]] = WeakTable()
        # Those with the record of a failed call, and when to withdraw that, by
        # ``time.monotonic``. Their stores may have been freed.
        self._failed: dict[Session, float] = {}

    def of(self, call: ActiveCall) -> Session | None:
        """Return the session of a call's rank and store; None if its rank is unknown.

        A process that has not registered is registered here, if the environment has
        its rank.
        """
        for handle, own in rank_registry.recorded_agents():
            if _state_of(handle) is call.state:
                return self._session(handle, own.rank, own.world_size)
        for handle, known in rank_registry.registrations():
            if not _is_store_of(call, handle):
                continue
            rank = rank_registry.rank_of_thread(handle, call.thread_id)
            if rank is not None:
                return self._session(handle, rank, known[rank].world_size)
        return self._register(call.state)

    def end(self, call: ActiveCall, record: BlockedRecord, *, failed: bool) -> None:
        """Withdraw the record of a call that has ended, or mark it if it has failed.

        If the process ends because of that, the record stays: its rank waited for
        others until then. A process that does not end withdraws it later.
        """
        session = self.of(call)
        if session is None:
            return
        if not failed:
            session.withdraw()
        elif session.mark_failed(record):
            self._failed[session] = time.monotonic() + _OUTLIVED

    def _withdraw_failed(self) -> None:
        now = time.monotonic()
        for session in [one for one, due in self._failed.items() if now >= due]:
            del self._failed[session]
            with suppress(*STORE_ERRORS):
                session.withdraw_marked()

    def poll(self) -> None:
        """Answer questions in every store in which this process has registered."""
        self._withdraw_failed()
        self._by_store.drop_dead()
        # A session refers to its store weakly: it may be freed while this polls.
        for session in self._registered():
            session.poll()

    def _registered(self) -> list[Session]:
        return [
            self._session(handle, rank, known[rank].world_size)
            for handle, known in rank_registry.registrations()
            for rank in (min(known),)
        ]

    def _session(self, handle: Any, rank: int, world_size: int) -> Session:
        sessions = self._by_store.setdefault(handle, {})
        session = sessions.get(rank)
        if session is None or session.member.world_size != world_size:
            session = sessions[rank] = Session(
                handle, _member(handle, rank, world_size), answers=self._answers
            )
        return session

    def _register(self, state: StoreState) -> Session | None:
        identity = process_identity()
        rank, world_size = identity.rank, identity.world_size
        if rank is None or world_size is None or not rank < world_size:
            return None
        session = self._session(state, rank, world_size)
        if state.inner is not None:
            rank_registry.register(
                state, rank, world_size, connection=session.connection
            )
        return session


def _interval(member: Member) -> float | None:
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
