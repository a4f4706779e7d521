"""One rank's barrier call: torch's barrier, and the names of missing ranks.

The keys are torch's (see `protocol`), so traced and plain ranks meet in one barrier. A
rank that arrives writes its arrival into the ledger and adds itself to the count. The
last one sets a key, which the others wait for. While they wait, the first ranks to
arrive read who is missing and warn. At the timeout every rank knows.

The store's timeout is not changed: the one wait has its own, so other threads that use
the store are not affected.
"""

import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import Any

from tracedstore import names
from tracedstore.common.errors import TIMEOUT, error_type
from tracedstore.common.identity import is_from_torch
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.common.timeouts import run_with_timeout, start_bounded_thread
from tracedstore.coordination.arrivals import has_duplicates, read_arrivals
from tracedstore.coordination.barrier_telemetry import (
    BarrierTelemetry,
    guarded,
)
from tracedstore.coordination.barrier_timeout import BarrierTimeout
from tracedstore.coordination.connections import bare_store, side_connection
from tracedstore.coordination.exchange import AnyStore
from tracedstore.coordination.meeting import AnyMeeting, Meeting
from tracedstore.coordination.missing_reader import (
    READ_TIMEOUT,
    READERS,
    MissingReader,
)
from tracedstore.coordination.missing_report import Examine, MissingReport
from tracedstore.coordination.protocol import BarrierKeys, Ledger
from tracedstore.coordination.rank_registry import is_registered, register
from tracedstore.coordination.trace_context import job_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.recording.watcher import WATCHER

# Seconds until a warning that never comes.
_NEVER = 1e9


def waiting_barrier(key: str) -> int | None:
    """Return the world size of a barrier of this process that waits for a key.

    Args:
        key: The key, which may have the prefixes of PrefixStores.
    """
    for call in list(WATCHER.watches):
        if isinstance(call, BarrierCall):
            own_key = call.last_member_key
            if key == own_key or key.endswith(f"/{own_key}"):
                return call.world_size
    return None


class BarrierCall(BarrierTelemetry):
    """One rank's call of one barrier; a `core.watcher.Watched`.

    A completed call is all that a healthy job makes, and its caches are cold: the way
    through it has few objects and few functions.

    Args:
        store: The store through which the ranks meet.
        world_size: Number of ranks.
        key_prefix: Prefix of the barrier's keys.
        timeout: Seconds to wait.
        rank: The rank of this process, where it is known.
        decoder: Returns the name of a rank.
        trace_timeout: Seconds for ranks that arrived without a name to write it.
        examine: Finds out why ranks do not arrive.
        warn_after: Seconds until the first warning; 0 for none.
    """

    observer = names.BARRIERS
    # A thread reads who is missing.
    _warning = False

    def __init__(
        self,
        store: AnyStore,
        world_size: int,
        key_prefix: str,
        timeout: float,
        rank: int | None,
        decoder: Callable[[int], str] | None,
        trace_timeout: float,
        examine: Examine,
        warn_after: float,
    ) -> None:
        self.began = RECORDER.ticks()
        self.started = started = time.monotonic()
        self.due = started + (warn_after if warn_after > 0 else _NEVER)
        self.prefix = key_prefix
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._decoder = decoder
        self._trace_timeout = trace_timeout
        self._examine = examine
        self.traced = traced = TELEMETRY.tracing_enabled()
        self.observed = observed = traced or TELEMETRY.emits_debug_events()
        if observed:
            self.caller = copy_context()

    @property
    def _keys(self) -> BarrierKeys:
        return BarrierKeys(self.prefix)

    @property
    def last_member_key(self) -> str:
        """The key that the last rank sets."""
        return self._keys.last_member

    def run(self) -> None:
        """Arrive, and wait for the other ranks.

        Raises:
            BarrierTimeout: A rank did not arrive in time.
        """
        # The span covers the calls. Theirs would be in other traces: the span is made
        # later, and has no id before.
        covered = self.traced and get_ident() not in RECORDER.without_call_spans
        if covered:
            RECORDER.without_call_spans.add(get_ident())
        store = self._store
        try:
            # Before the arrival: between arrival and wait there must be no delay. The
            # last rank may serve the store, and exit as soon as it has returned.
            WATCHER.watches.add(self)
            if self.due < WATCHER.looks_at:
                guarded(WATCHER.wake)
            try:
                self._introduce(store)
                # Its results can be read while it waits.
                self.meeting = meeting = self._new_meeting(store)
                meeting.arrive(store)
                self._wait_or_complete(store, meeting)
                if meeting.is_last and (entries := meeting.entries) is not None:
                    guarded(self._audit, entries)
            finally:
                WATCHER.watches.discard(self)
        except BaseException as error:
            if raised_by_handler(error) or not isinstance(error, Exception):
                guarded(self.end_interrupted)
            else:
                off_main_thread(self._end_failed, error, store)
            raise
        finally:
            self._store = None  # a thread that warns may keep this call
            if covered:
                RECORDER.without_call_spans.discard(get_ident())
        duration = RECORDER.ticks() - self.began
        self.ended = True
        RECORDER.cold.record(
            (names.BARRIER_DURATION, (self.prefix, "completed"), duration),
            (names.BARRIER_LAST_ARRIVALS, (self.prefix,), meeting.is_last),
        )
        if self.observed:
            self.duration = duration
            TELEMETRY.defer(self.emit_completed)

    def _introduce(self, store: AnyStore) -> None:
        """Register the rank, and learn the job; mostly nothing is left to do."""
        if self.rank is not None and not is_registered(store, self.rank):
            guarded(register, store, self.rank, self.world_size)
        if self.traced:
            self.job = job_of(store)

    def _end_failed(self, error: Exception, store: AnyStore) -> None:
        """End a call that raised; the caller raises the error again.

        Raises:
            BarrierTimeout: In its stead, if it is the store's timeout.
        """
        if error_type(error) == TIMEOUT:
            timed_out = self._timed_out(store)
            raise timed_out from None
        from_torch = is_from_torch(bare_store(store))
        self.emit_failed(error, from_torch=from_torch)

    def _new_meeting(self, store: AnyStore) -> AnyMeeting:
        native = RECORDER.native
        if native is not None and type(store) is native.store_class:
            made: AnyMeeting | None = store._meeting(  # noqa: SLF001
                *(self.prefix, self.rank, self.world_size),
                *(self._timeout, self.observed),
            )
            if made is not None:
                return made
        return Meeting(
            *(self.prefix, self.rank, self.world_size, self._timeout),
            observed=self.observed,
        )

    def _wait_or_complete(self, store: AnyStore, meeting: AnyMeeting) -> None:
        order = meeting.order
        if order == self.world_size:
            meeting.complete(store)
            return
        if order > self.world_size:
            guarded(self._report_stale, order)
        meeting.wait(store)

    # The rest is optional and must not fail the barrier.

    def _audit(self, entries: bytes) -> None:
        """Report a rank that was counted twice: the barrier completed too early."""
        ledger = Ledger(entries)
        if self.rank is not None and has_duplicates(self._store, self._keys, ledger):
            self._report_stale(self.world_size)

    def _report_stale(self, arrived: int) -> None:
        arrivals = read_arrivals(self._store, self._keys, self.world_size)
        self.emit_stale(arrived, arrivals.duplicate_ranks)

    def report(self) -> None:
        """Start to read who is missing, unless that is under way."""
        if 0 < self.meeting.order <= READERS and not self._warning:
            # Not waited for: a store that hangs must not hold up the watcher.
            start_bounded_thread(partial(guarded, self._read_and_warn))

    def _read_and_warn(self) -> None:
        self._warning = True
        try:
            report = self._read_while_waiting()
            if report is not None and report.unseen_ranks:
                self.emit_waiting(report)
        finally:
            self._warning = False

    def _read_while_waiting(self) -> MissingReport | None:
        """Read and publish who is missing; None if the call has ended."""
        own = self._store
        if own is None:
            return None
        connection = side_connection(own)
        # The job may free it meanwhile, and its server with it.
        del own
        with RECORDER.no_call_spans(), connection as store:
            report = self._reader().read(store)
            if report.unseen_ranks:
                self._publish(store, report)
            return report

    def _reader(self) -> MissingReader:
        return MissingReader(
            keys=self._keys,
            rank=self.rank,
            world_size=self.world_size,
            order=self.meeting.order,
            decoder=self._decoder,
            trace_timeout=self._trace_timeout,
            examine=self._examine,
        )

    def _timed_out(self, store: AnyStore) -> BarrierTimeout:
        # Not a side connection: the wait is over, so the store's own one is free. A new
        # one fails where rank 0 served the store, timed out first and exited.
        reader = self._reader()
        report = MissingReport.unknown(self.world_size)
        try:
            report = run_with_timeout(
                READ_TIMEOUT, partial(reader.read_after_timeout, store)
            )
            report = reader.wait_for_names(store, report)
            run_with_timeout(
                READ_TIMEOUT, partial(self._publish_after_timeout, store, report)
            )
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
        return self.emit_timed_out(
            report, self._timeout, own_names=self._decoder is not None
        )

    def _publish_after_timeout(self, store: AnyStore, report: MissingReport) -> None:
        with RECORDER.no_call_spans():
            self._publish(store, report)
            if self.rank == 0:
                # Plain torch's other ranks wait for rank 0 to have read.
                store.set(self._keys.tracing_gate, "<val_ignored>")

    def _publish(self, store: Any, report: MissingReport) -> None:
        store.set(self._keys.missing_report, report.to_bytes())
