"""A connection of the diagnosis to one store, and what it publishes there."""

import os
import time
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from torch.distributed import DistError

from tracedstore.coordination import decoders, membership, rank_registry
from tracedstore.coordination.arrivals import (
    bare_store,
    connect_again,
    is_one_connection,
    read_key,
)
from tracedstore.core.counters import ActiveCall, StoreState
from tracedstore.core.identity import bottom_of, number, process_identity
from tracedstore.diagnosis.blocked_call import Member
from tracedstore.diagnosis.blocked_record import (
    BlockedRecord,
    publish_blocked,
    withdraw_blocked,
)
from tracedstore.diagnosis.incarnations import check_replaced
from tracedstore.diagnosis.local_client import host_has_agent
from tracedstore.diagnosis.questions import (
    MAX_POLLING_RANKS,
    polling_interval_of_rank,
)
from tracedstore.diagnosis.responder import Responder
from tracedstore.diagnosis.server import probe_server
from tracedstore.diagnosis.stalled import VERDICT
from tracedstore.diagnosis.verdict import Verdict

# The number of verdicts so far, and of the processes that looked for the next one.
_VERDICT_COUNT: Final = "tracedstore/VERDICTS"
_LOOKERS: Final = "tracedstore/DIAGNOSING"
# Seconds for the agent of this host to answer, once per store of a large job.
_AGENT_TIMEOUT: Final = 1.0
# Seconds from a failed read of questions to the next one.
_RETRY_AFTER: Final = 30.0
# What a store raises whose server cannot be reached, or that was freed.
STORE_ERRORS: Final = (OSError, DistError, ReferenceError)


class Session:
    """One rank of this process in one store, seen by the diagnosis.

    It refers to the store weakly: a store that is kept keeps its server and its port.

    Attributes:
        member: The rank.
    """

    def __init__(self, store: Any, member: Member, *, answers: bool) -> None:
        self.member = member
        self._store = ref(store)
        # A clone, where the store itself cannot be used.
        self._clone: Any = None
        # The store of a blocked call, where it is another one, and its clone.
        self._call_store: ref[Any] = ref(store)
        self._call_clone: Any = None
        self._published = False
        self._poll_at = 0.0
        self._responder: Responder | None = None
        # Seconds between two reads of questions; None if another process answers.
        self._interval = _interval(member) if answers else None

    @property
    def connection(self) -> Any:
        """A connection that no other thread uses.

        Raises:
            OSError: The server of the store cannot be reached.
            ReferenceError: The store was freed.
        """
        store = self._store()
        if store is None:
            raise ReferenceError("the store was freed")
        if self._clone is None:
            self._clone = _clone(store)
        return store if self._clone is None else self._clone

    def connection_to(self, state: StoreState) -> Any:
        """Return a connection to the store of a call.

        Its keys may have other prefixes than those of the store in which this rank
        registered.

        Raises:
            OSError: The server of the store cannot be reached.
        """
        if state.inner is self._store():
            return self.connection
        if self._call_store() is not state.inner:
            self._call_clone = _clone(state.inner)
            self._call_store = ref(state.inner)
        return state.inner if self._call_clone is None else self._call_clone

    def publish(self, record: BlockedRecord) -> None:
        """Publish the record of a blocked call of this rank."""
        if not self._published and self.member.agents is None:
            check_replaced(self.connection, self.member.rank, self.member.world_size)
        publish_blocked(self.connection, record, first=not self._published)
        self._published = True

    def withdraw(self) -> None:
        """Withdraw the record of this rank."""
        withdraw_blocked(self.connection, self.member.rank)

    def take_order(self) -> int:
        """Return the position of this process among those that look, from 1."""
        # add() with 0 reads a counter on every store.
        number = self.connection.add(_VERDICT_COUNT, 0)
        order: int = self.connection.add(f"{_LOOKERS}/{number}", 1)
        return order

    def read_verdict(self, record: BlockedRecord, since: float) -> Verdict | None:
        """Return the latest verdict if it covers a blocked call of this rank."""
        if not self.connection.check([VERDICT]):
            return None
        verdict = Verdict.from_bytes(read_key(self.connection, VERDICT))
        if verdict is None or verdict.time < since:
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
                    self.connection, self.member.rank, self.member.world_size
                )
            self._responder.poll()
        except STORE_ERRORS:
            # At the end of a job its server ends first: that is no failure.
            self._clone = self._responder = None
            self._poll_at = now + _RETRY_AFTER


class Sessions:
    """The sessions of this process, one for each rank and store."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        # By store and rank.
        self._by_store: WeakKeyDictionary[Any, dict[int, Session]] = WeakKeyDictionary()

    def of(self, call: ActiveCall) -> Session | None:
        """Return the session of a call's rank and store; None if its rank is unknown.

        A process that has not registered is registered here, if the environment has
        its rank.
        """
        for store, own in membership.memberships():
            if _state_of(store) is call.state:
                return self._session(store, own.rank, own.world_size)
        for store, known in rank_registry.registrations():
            if not _is_store_of(call, store):
                continue
            rank = rank_registry.rank_of_thread(store, call.thread_id)
            if rank is not None:
                return self._session(store, rank, known[rank].world_size)
        return self._register(call.state)

    def poll(self) -> None:
        """Answer questions in every store in which this process has registered."""
        for store, known in rank_registry.registrations():
            rank = min(known)
            self._session(store, rank, known[rank].world_size).poll()

    def _session(self, store: Any, rank: int, world_size: int) -> Session:
        sessions = self._by_store.setdefault(store, {})
        session = sessions.get(rank)
        if session is None or session.member.world_size != world_size:
            session = sessions[rank] = Session(
                _untraced(store),
                _member(store, rank, world_size),
                answers=self._answers,
            )
        return session

    def _register(self, state: StoreState) -> Session | None:
        identity = process_identity()
        rank, world_size = identity.rank, identity.world_size
        if rank is None or world_size is None or not rank < world_size:
            return None
        store = state.inner
        session = self._session(store, rank, world_size)
        rank_registry.register(session.connection, rank, world_size)
        return session


def reports_by_itself() -> bool:
    """Return whether this process reports a store that does not respond.

    The ranks cannot agree on one then, so one a host does.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


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


def _member(store: Any, rank: int, world_size: int) -> Member:
    own = membership.of(store)
    if own is not None:
        return Member(
            rank=own.rank,
            world_size=own.world_size,
            host_of=own.name_of,
            agents=own.processes,
        )
    roster = decoders.auto()

    def host_of(rank: int) -> str:
        name = decoders.name_of(roster, rank)
        return "" if name == decoders.default_name(rank) else name

    return Member(rank=rank, world_size=world_size, host_of=host_of)


def _clone(store: Any) -> Any:
    """Return a clone to use while another thread waits on the store.

    None for a store that can be used itself.
    """
    if not is_one_connection(store):
        return None
    bare = bare_store(store)
    # A TCPStore retries for as long as its own timeout.
    if hasattr(bare, "port") and (cause := probe_server(bare.host, bare.port)):
        raise ConnectionError(f"{bare.host}:{bare.port}: {cause}")
    return connect_again(store)


def _is_store_of(call: ActiveCall, store: Any) -> bool:
    """Return whether a call is one of a store, or of a clone of it."""
    state = _state_of(store)
    if state is None or state is call.state:
        return state is call.state
    return state.identity == call.state.identity and not state.identity.in_process


def _state_of(store: Any) -> StoreState | None:
    state: StoreState | None = getattr(bottom_of(store), "_traced", None)
    return state


def _untraced(store: Any) -> Any:
    state = getattr(store, "_traced", None)
    return store if state is None else state.inner
