"""The waits of the ranks of this process: what blocks them, and since when.

A wait is not the same as a call. A program may repeat a call as soon as it has timed
out, for the same keys: that is one wait, which began with the first call. torch does
so in its barrier after the creation of a process group. A program that asks for a key
in each step of its work, with a short timeout, does not wait: between two of these
calls the process goes on.

Not every blocked call is the wait of a rank (`local.rank_threads`). Of several waits of
a rank one counts, because a rank has one record: that of the main thread, else that of
the thread that registered the rank, else that of a thread for which the main thread
waits, else that of a thread that creates a process group or is in a barrier; of several
of these the oldest.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from tracedstore.common.identity import StoreIdentity
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.observe.blocked_calls import (
    blocked_calls,
    describe_call,
    describe_keys,
    is_of_group,
    timeout_of,
    waited_seconds,
)
from tracedstore.diagnosis.observe.blocked_record import MAX_KEYS, BlockedRecord
from tracedstore.diagnosis.observe.polls import POLLS, Poll
from tracedstore.local.facts import ended_calls
from tracedstore.local.rank_threads import AWAITED, rank_threads
from tracedstore.recording.counters import ActiveCall, StoreState
from tracedstore.recording.recorder import Recorder

# Seconds within which a call that timed out is repeated. A busy machine may take some.
PAUSE: Final = 5.0
# Less than 1, because the caller has measured the same wait a moment before.
_DOUBLED: Final = 0.9
# Seconds by which two readings of when a call began may differ.
_TOLERANCE: Final = 0.5
_MAX_WAITS: Final = 256
# Store calls between two of a wait, itself included: a loop may look for a key to stop
# at, or write that it is alive.
_MAX_CALLS_BETWEEN: Final = 4
OF_GROUP: Final = AWAITED + 1


@dataclass(slots=True, eq=False)
class Repeated:
    """Calls that follow each other, and are one wait.

    Attributes:
        since: When the first one began, by ``time.monotonic``.
        ended_at: When the latest one timed out, by the same clock; None before that.
        report_at: When the next report is due, by the same clock.
        lasted: Seconds of the latest one that timed out.
        calls: The number of Store calls of this process that had ended then.
        latest: When the latest one began, by the same clock.
    """

    since: float
    ended_at: float | None = None
    report_at: float = 0.0
    lasted: float = 0.0
    calls: int = 0
    latest: float = 0.0

    def waited(self) -> float:
        """Return for how many seconds it has lasted."""
        return time.monotonic() - self.since

    def is_due(self) -> bool:
        """Return whether a report is due; if so, it is taken as made."""
        now = time.monotonic()
        if now < self.report_at:
            return False
        self.report_at = now + _DOUBLED * (now - self.since)
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class Pending:
    """What blocks a rank of this process, as the rounds of the diagnosis need it.

    Attributes:
        key: Its identity. What a program repeats has the same.
        repeated: Since when the rank waits for it.
        thread_id: The thread that waits.
        order: Of several, the first in this order is the wait of the rank; the oldest
            of those that are equal.
        state: The store whose keys it waits for, or in which the ranks meet. It is kept
            as long as this object.
        timeout: Seconds after which it fails by itself; 0 if it does not.
        failed: It has ended with an exception.
    """

    key: Hashable
    repeated: Repeated
    thread_id: int
    order: int
    state: StoreState | None
    timeout: float = 0.0
    failed: bool = False

    def describe(
        self,
        connection: Any,
        member: Member,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return what it waits for now; None if nothing keeps it any more.

        Args:
            connection: A connection to its store.
            member: The rank.
            started: When the wait began, in seconds since the epoch.
            complete: Find all ranks that it waits for also in a large group.
            also: In a large group, look at these ranks as well.
        """
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class PendingCall(Pending):
    """A Store call in flight, or one that has just timed out."""

    state: StoreState
    active: ActiveCall

    def describe(
        self,
        connection: Any,
        member: Member,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return what its keys are for, and who should write those that are absent."""
        record = describe_call(
            connection, self.active, member, started, complete=complete, also=also
        )
        if record is None or self.order != AWAITED:
            return record
        return replace(record, may_be_idle=True)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingPoll(Pending):
    """A thread that asks for the same keys until they exist.

    Attributes:
        store: The store. The call has ended, and does not keep it.
        keys: The first keys.
    """

    store: StoreIdentity
    keys: tuple[str, ...]

    def describe(
        self,
        connection: Any,
        member: Member,
        started: float,
        *,
        complete: bool = False,
        also: Sequence[int] = (),
    ) -> BlockedRecord | None:
        """Return who should write those of its keys that are absent."""
        record = describe_keys(
            connection,
            "check",
            self.keys,
            member,
            started,
            complete=complete,
            also=also,
        )
        return None if record is None else replace(record, may_be_idle=True)


def key_of(call: ActiveCall) -> Hashable:
    """Return the identity of the wait that a call is, or is a part of.

    It is the thread, the location of the store and the keys: a program may create the
    store again.
    """
    keys, count = call.method.keys_of(call.args)
    first = (one for one in islice(iter(keys), MAX_KEYS) if isinstance(one, str))
    return (call.thread_id, call.state.identity, count, *first)


# What threads of this process wait in besides Store calls. While a thread is in a
# Store call, it waits in that.
PENDING: Final[set[Pending]] = set()


class Waits:
    """The waits of this process, with the calls that are repeated.

    Args:
        recorder: What records the calls.
        moved_at: Returns when a collective of this process last moved, by
            ``time.monotonic``.
    """

    def __init__(
        self, recorder: Recorder, moved_at: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._recorder = recorder
        self._moved_at = moved_at
        self._by_key: dict[Hashable, Repeated] = {}
        # A call that has timed out is noted by the thread that made it.
        self._lock = threading.RLock()

    def pending(self) -> list[Pending]:
        """Return what ranks wait in, in the order in which that counts."""
        threads = rank_threads()
        found: list[Pending] = [*self._calls(threads)]
        in_calls = {call.thread_id for call in blocked_calls(self._recorder)}
        for other in list(PENDING):
            if other.thread_id not in in_calls:
                other.order = threads.get(other.thread_id, OF_GROUP)
                found.append(other)
        for poll in POLLS.look():
            order = threads.get(poll.thread_id)
            if order is not None and poll.thread_id not in in_calls:
                found.append(
                    PendingPoll(
                        key=poll.key,
                        repeated=self._polled(poll),
                        thread_id=poll.thread_id,
                        order=order,
                        state=None,
                        store=poll.store,
                        keys=poll.keys,
                    )
                )
        return sorted(found, key=lambda one: (one.order, one.repeated.since))

    def calls(self) -> list[PendingCall]:
        """Return the Store calls among them, in no order."""
        return self._calls(rank_threads())

    def _calls(self, threads: Mapping[int, int]) -> list[PendingCall]:
        calls = blocked_calls(self._recorder)
        pending = (self._pending(call, threads) for call in calls)
        return [one for one in pending if one is not None]

    def of(self, active: ActiveCall) -> PendingCall | None:
        """Return the wait that a call is; None if no rank waits in it."""
        return self._pending(active, rank_threads())

    def _pending(
        self, active: ActiveCall, threads: Mapping[int, int]
    ) -> PendingCall | None:
        order = threads.get(active.thread_id)
        if order is None and is_of_group(active):
            order = OF_GROUP
        if order is None:
            return None
        return PendingCall(
            key=key_of(active),
            repeated=self._repeated(active),
            thread_id=active.thread_id,
            order=order,
            state=active.state,
            timeout=max(0.0, timeout_of(active).total_seconds()),
            active=active,
        )

    def _repeated(self, active: ActiveCall) -> Repeated:
        """Return since when a call is repeated, with the call itself."""
        key = key_of(active)
        began = time.monotonic() - waited_seconds(self._recorder, active)
        with self._lock:
            known = self._by_key.pop(key, None)
            # One that is in flight all the time, or was repeated at once.
            ended_at = None if known is None else known.ended_at
            if known is None or (
                ended_at is not None
                and (began > ended_at + PAUSE or self._went_on(known, ended_at, began))
            ):
                known = Repeated(since=began)
            elif ended_at is None and began > known.since + _TOLERANCE:
                known = Repeated(since=began)  # the one before has returned
            known.latest = began
            self._by_key[key] = known
            if len(self._by_key) > _MAX_WAITS:
                del self._by_key[next(iter(self._by_key))]
            return known

    def _went_on(self, known: Repeated, ended_at: float, began: float) -> bool:
        """Return whether the process did other things before a call was repeated.

        For longer than it had waited: torch's barrier counts its arrivals in between.
        """
        is_latest = began - known.latest <= known.lasted  # and was looked at before
        if is_latest or began - ended_at <= known.lasted:
            return False
        between = ended_calls(self._recorder) - known.calls
        return between > _MAX_CALLS_BETWEEN or self._moved_at() > ended_at

    def _polled(self, poll: Poll) -> Repeated:
        with self._lock:
            known = self._by_key.get(poll.key)
            if known is None or known.since != poll.since:
                known = self._by_key[poll.key] = Repeated(since=poll.since)
            return known

    def timed_out(self, active: ActiveCall) -> Repeated:
        """Note that a call has timed out; return the wait that it is a part of."""
        with self._lock:
            known = self._repeated(active)
            known.ended_at = time.monotonic()
            known.lasted = waited_seconds(self._recorder, active)
            known.calls = ended_calls(self._recorder)
            return known

    def forget(self, key: Hashable) -> None:
        """Forget a wait that is over."""
        with self._lock:
            self._by_key.pop(key, None)
