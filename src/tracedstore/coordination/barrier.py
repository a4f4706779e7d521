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
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from tracedstore import names
from tracedstore.coordination import decoders, steps
from tracedstore.coordination.arrivals import (
    bare_store,
    confirm_arrival,
    has_duplicates,
    read_arrivals,
    read_key,
    side_connection,
)
from tracedstore.coordination.barrier_telemetry import BarrierTelemetry, guarded
from tracedstore.coordination.barrier_timeout import BarrierTimeout
from tracedstore.coordination.exchange import AnyStore
from tracedstore.coordination.key_index import record_keys
from tracedstore.coordination.missing_report import Examine, MissingReport
from tracedstore.coordination.protocol import (
    LAST_MEMBER,
    LEDGER,
    BarrierKeys,
    LastArrival,
    Ledger,
    is_complete,
)
from tracedstore.coordination.ranges import MAX_RANKS
from tracedstore.coordination.rank_registry import (
    is_registered,
    register,
    registry_decoder,
)
from tracedstore.coordination.trace_context import NO_SPAN, BarrierSpan
from tracedstore.core.errors import TIMEOUT, error_type
from tracedstore.core.identity import is_from_torch
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import TELEMETRY
from tracedstore.core.timeouts import run_with_timeout, start_bounded_thread
from tracedstore.core.watcher import WATCHER

# How many of the first ranks to arrive read who is missing. One of them may die; with
# ten thousand the store would be overloaded.
_READERS = 2
# Seconds between reads while ranks that were counted have not written their names.
_READ_INTERVAL = 0.1
# Seconds that reading may take: the store may be gone, or hang. The verdict is due
# within 5 s of the timeout.
_READ_TIMEOUT = 4.0
# Seconds that the other ranks wait for the readers' report.
_REPORT_TIMEOUT = 1.0
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

    __slots__ = (
        "_decoder",
        "_examine",
        "_store",
        "_timeout",
        "_trace_timeout",
        "_warning",
        "due",
        "in_ledger",
        "started",
    )

    observer = names.BARRIERS

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
        self.started = time.monotonic()
        self.due = self.started + (warn_after if warn_after > 0 else _NEVER)
        self.telemetry = TELEMETRY
        self.prefix = key_prefix
        self.rank = rank
        self.world_size = world_size
        self.arrived = self.order = 0
        self.is_last = self.ended = False
        self._store = store
        self._timeout = timeout
        self._decoder = decoder
        self._trace_timeout = trace_timeout
        self._examine = examine
        self.in_ledger = False
        self.last: bytes | None = None
        # A thread reads who is missing.
        self._warning = False
        self.span = NO_SPAN
        self.observed = TELEMETRY.emits_debug_events()
        if TELEMETRY.tracing_enabled():
            self.span = BarrierSpan(TELEMETRY, key_prefix, rank, world_size)
            self.observed = True

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
        # The span covers the calls. Theirs would be in other traces: their parent is
        # not known yet.
        with_call_spans = self.span.enabled and RECORDER.stop_call_spans()
        store = self._store
        try:
            # Before the arrival: between arrival and wait there must be no delay. The
            # last rank may serve the store, and exit as soon as it has returned.
            WATCHER.watches.add(self)
            if self.due < WATCHER.looks_at:
                guarded(WATCHER.wake)
            try:
                rank, size = self.rank, self.world_size
                timeout = timedelta(seconds=self._timeout)
                first = self.span.enabled or not hasattr(store, "list_keys")
                try:
                    if rank is not None and not is_registered(store, rank):
                        register(store, rank, size)
                except Exception as error:
                    RECORDER.failures.add(names.BARRIERS, error)
                native = RECORDER.native
                if not (
                    native is not None
                    and type(store) is native.store_class
                    # What C++ takes.
                    and type(rank) is type(size) is int
                    and 0 <= rank < size < MAX_RANKS
                    and store._meet(  # noqa: SLF001
                        self, self.prefix, rank, size, timeout, self.observed, first
                    )
                ):
                    self._meet(timeout)
            finally:
                WATCHER.watches.discard(self)
        except Exception as error:
            if error_type(error) != TIMEOUT:
                from_torch = is_from_torch(bare_store(self._store))
                self.emit_failed(error, from_torch=from_torch)
                raise
            timed_out = self._timed_out()
            raise timed_out from None
        except BaseException:
            self.end_interrupted()
            raise
        finally:
            if self.span.enabled:
                RECORDER.resume_call_spans(with_call_spans)
        duration = RECORDER.ticks() - self.began
        self.ended = True
        RECORDER.barriers.end(self, self.prefix, "completed", duration, self.is_last)
        if self.observed:
            self._store = None  # must not be kept until then
            self.defer_completed(duration)

    def _meet(self, timeout: timedelta) -> None:
        """Arrive and wait, or go on where C++ has stopped."""
        store = self._store
        if not self.order:
            self.order, self.in_ledger = steps.arrive(store, self._keys, self.rank)
            self.arrived = RECORDER.ticks()
        if self.order == 1:
            guarded(record_keys, store, self._keys.num_members)
        if self.order == self.world_size:
            self._complete()
            return
        if self.order > self.world_size:
            guarded(self._report_stale, self.order)
        elif self.order == 1 and self.span.enabled:
            guarded(steps.publish_trace, store, self._keys, self.span)
        self.last = steps.wait_for(store, self.last_member_key, timeout, self.observed)

    def _complete(self) -> None:
        """Complete the barrier, as the last rank."""
        store, shared, ledger = self._store, "", None
        if self.span.enabled:
            # Before the barrier completes: the others read the shared trace from here.
            shared, ledger = guarded(
                steps.shared_trace, store, self._keys, self.span, self.in_ledger
            ) or ("", None)
        # A TCPStore does not acknowledge a set. If this process serves the store and
        # ends now, the others get a network error instead of their wake-up. After one
        # round trip the server has answered their waits. torch's barrier does the same.
        # Here it reads the ledger, if that is to be read.
        to_read = self.prefix + LEDGER if self.in_ledger and ledger is None else ""
        last = LastArrival(self.rank, shared).to_json()
        native = RECORDER.native
        complete = (
            store._complete  # noqa: SLF001
            if native is not None and type(store) is native.store_class
            else partial(steps.complete, store)
        )
        entries: bytes | None = complete(self.prefix + LAST_MEMBER, last, to_read)
        self.is_last, self.last = True, last.encode()
        if entries is None and to_read:
            return  # it could not be read
        if entries is None or not is_complete(entries, self.world_size):
            guarded(self._audit, ledger or Ledger(entries or b""))

    # The rest is optional and must not fail the barrier.

    def _audit(self, ledger: Ledger) -> None:
        """Report a rank that was counted twice: the barrier completed too early."""
        if self.rank is not None and has_duplicates(self._store, self._keys, ledger):
            self._report_stale(self.world_size)

    def _report_stale(self, arrived: int) -> None:
        arrivals = read_arrivals(self._store, self._keys, self.world_size)
        self.emit_stale(arrived, arrivals.duplicate_ranks)

    def report(self) -> None:
        """Start to read who is missing, unless that is under way."""
        store = self._store
        if 0 < self.order <= _READERS and not self._warning and store is not None:
            # Not waited for: a store that hangs must not hold up the watcher.
            start_bounded_thread(partial(guarded, self._read_and_warn, store))

    def _read_and_warn(self, store: AnyStore) -> None:
        self._warning = True
        try:
            report = self._read_while_waiting(store)
            if report.unseen_ranks:
                self.emit_waiting(report)
        finally:
            self._warning = False

    def _read_while_waiting(self, own: AnyStore) -> MissingReport:
        with RECORDER.no_call_spans(), side_connection(own) as store:
            report = self._with_findings(store, self._read_missing(store))
            if report.unseen_ranks:
                store.set(self._keys.missing_report, report.to_bytes())
            return report

    def _timed_out(self) -> BarrierTimeout:
        report = MissingReport.unknown(self.world_size)
        try:
            report = run_with_timeout(_READ_TIMEOUT, self._read_after_timeout)
            report = self._wait_for_names(report)
            run_with_timeout(_READ_TIMEOUT, lambda: self._publish(report))
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
        return self.emit_timed_out(
            report, self._timeout, own_names=self._decoder is not None
        )

    # Not a side connection from here on: the wait is over, so the store's own one is
    # free. A new one fails where rank 0 served the store, timed out first and exited.

    def _read_after_timeout(self) -> MissingReport:
        """Return who is missing, from another rank's report or by reading."""
        store = self._store
        with RECORDER.no_call_spans():
            if self.rank is not None:
                confirm_arrival(store, self._keys, self.rank)
                if store.has_extended_api():
                    # Plain torch's rank 0 reads this key. Other stores have it already.
                    store.set(self._keys.trace(self.rank), "here")
            if self.order > _READERS and self._name_timeout:
                # The first ranks to arrive time out first, or at about the same time.
                report_timeout = min(_REPORT_TIMEOUT, self._name_timeout)
                with suppress(Exception):
                    store.wait(
                        [self._keys.missing_report], timedelta(seconds=report_timeout)
                    )
                published = self._published_report(store)
                if published is not None:
                    return published
            return self._with_findings(store, self._read_missing(store))

    @property
    def _name_timeout(self) -> float:
        """Seconds for ranks that arrived without a name to write it.

        Where this rank has no name either, torch's barrier does not wait, nor does
        this one.
        """
        return 0.0 if self.rank is None else self._trace_timeout

    def _wait_for_names(self, report: MissingReport) -> MissingReport:
        deadline = time.monotonic() + self._name_timeout
        while report.unidentified_count and time.monotonic() < deadline:
            time.sleep(_READ_INTERVAL)
            report = run_with_timeout(
                _READ_TIMEOUT, lambda: self._read_missing(self._store)
            )
        return report

    def _publish(self, report: MissingReport) -> None:
        with RECORDER.no_call_spans():
            self._store.set(self._keys.missing_report, report.to_bytes())
            if self.rank == 0:
                # Plain torch's other ranks wait for rank 0 to have read.
                self._store.set(self._keys.tracing_gate, "<val_ignored>")

    def _published_report(self, store: Any) -> MissingReport | None:
        """Return another rank's report, if no rank has arrived since."""
        if not store.check([self._keys.missing_report]):
            return None
        written = read_key(store, self._keys.missing_report)
        report = MissingReport.from_bytes(written, self.world_size)
        if report is None or report.unidentified_count:
            return None
        if self.rank in report.missing_ranks:
            return None
        if report.arrived_count != store.add(self._keys.num_members, 0):
            return None
        return report if self._decoder is None else report.with_names(self._decoder)

    def _with_findings(self, store: Any, report: MissingReport) -> MissingReport:
        """Add why ranks are missing, where that is known for certain."""
        if not report.missing_ranks:
            return report
        with RECORDER.unrecorded():
            findings = guarded(
                self._examine, store, report.missing_ranks, self.world_size
            )
        return report.with_findings(findings or {})

    def _read_missing(self, store: Any) -> MissingReport:
        arrivals = read_arrivals(store, self._keys, self.world_size)
        if arrivals.arrived_count < self.order:
            # The server restarted without its data, or the file was truncated. Ranks
            # whose arrival is gone must not be named: this one is among them.
            return MissingReport.unknown(self.world_size)
        decoder = self._decoder_for(store, arrivals.unseen_ranks)
        return MissingReport.from_arrivals(arrivals, self.world_size, decoder)

    def _decoder_for(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self._decoder is not None:
            return self._decoder
        registered = guarded(registry_decoder, store, missing)
        roster = decoders.auto()
        return roster if registered is None else decoders.chain(registered, roster)
