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
from tracedstore.coordination import decoders, rank_registry
from tracedstore.coordination.arrivals import (
    bare_store,
    confirm_arrival,
    has_duplicates,
    publish_traceparent,
    read_arrivals,
    read_key,
    read_ledger,
    read_traceparent,
    record_arrival,
    side_connection,
)
from tracedstore.coordination.barrier_telemetry import BarrierTelemetry, guarded
from tracedstore.coordination.barrier_timeout import BarrierTimeout
from tracedstore.coordination.exchange import AnyStore
from tracedstore.coordination.key_index import record_keys
from tracedstore.coordination.missing_report import Examine, MissingReport
from tracedstore.coordination.protocol import BarrierKeys, LastArrival, Ledger
from tracedstore.core.errors import TIMEOUT, error_type
from tracedstore.core.identity import is_from_torch
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import TELEMETRY
from tracedstore.core.timeouts import run_with_timeout, start_bounded_thread
from tracedstore.core.watcher import WATCHER, Watch

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


# The barrier calls of this process that wait, for the diagnosis of a stall.
_waiting: set["BarrierCall"] = set()


def waiting_barrier(key: str) -> int | None:
    """Return the world size of a barrier of this process that waits for a key.

    Args:
        key: The key, which may have the prefixes of PrefixStores.
    """
    for call in list(_waiting):
        own_key = call.last_member_key
        if key == own_key or key.endswith(f"/{own_key}"):
            return call.world_size
    return None


class BarrierCall:
    """One rank's call of one barrier.

    Args:
        store: The store through which the ranks meet.
        world_size: Number of ranks.
        key_prefix: Prefix of the barrier's keys.
        timeout: Seconds to wait.
        rank: The rank of this process, where it is known.
        decoder: Returns the name of a rank.
        trace_timeout: Seconds for ranks that arrived without a name to write it.
        examine: Finds out why ranks do not arrive.
    """

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
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._keys = BarrierKeys(key_prefix)
        self._timeout = timeout
        self._rank = rank
        self._decoder = decoder
        self._trace_timeout = trace_timeout
        self._examine = examine
        self._in_ledger = False
        # The position of this rank's arrival, 0 before it.
        self._order = 0
        # A thread reads who is missing.
        self._warning = False
        self._telemetry = BarrierTelemetry(TELEMETRY, key_prefix, rank, world_size)

    @property
    def last_member_key(self) -> str:
        """The key that the last rank sets."""
        return self._keys.last_member

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    def run(self, warn_after: float) -> None:
        """Arrive, and wait for the other ranks.

        Raises:
            BarrierTimeout: A rank did not arrive in time.
        """
        with self._telemetry.span.suppress_call_spans():
            # Before the arrival: between arrival and wait there must be no delay. The
            # last rank may serve the store, and exit as soon as it has returned.
            watch = self._watch(warn_after)
            try:
                try:
                    self._order = self._arrive()
                    if watch is not None and self._order > _READERS:
                        WATCHER.remove(watch)
                    last = self._wait()
                finally:
                    if watch is not None:
                        WATCHER.remove(watch)
            except Exception as error:
                if error_type(error) != TIMEOUT:
                    from_torch = is_from_torch(bare_store(self._store))
                    self._telemetry.failed(error, from_torch=from_torch)
                    raise
                timeout = self._timed_out()
                raise timeout from None
            except BaseException:
                self._telemetry.interrupted()
                raise
            self._telemetry.completed(last)

    def _watch(self, warn_after: float) -> Watch | None:
        """Let the watcher warn while this call waits."""
        if warn_after <= 0 or self._world_size == 1:
            return None
        watch = Watch(names.BARRIERS, self._warn, warn_after)
        guarded(WATCHER.add, watch)
        return watch

    def _arrive(self) -> int:
        """Record the arrival; return its position, from 1."""
        if self._rank is not None:
            guarded(rank_registry.register, self._store, self._rank, self._world_size)
            self._in_ledger = bool(
                guarded(record_arrival, self._store, self._keys, self._rank)
            )
        order: int = self._store.add(self._keys.num_members, 1)
        self._telemetry.arrived(order)
        if order == 1:
            guarded(record_keys, self._store, self._keys.num_members)
        if order > self._world_size:
            guarded(self._report_stale, order)
        elif order == 1 < self._world_size and self._telemetry.span.enabled:
            guarded(self._publish_traceparent)
        return order

    def _wait(self) -> LastArrival:
        """Wait for the last rank; return what it wrote."""
        if self._order == self._world_size:
            return self._complete()
        _waiting.add(self)
        try:
            self._store.wait([self.last_member_key], timedelta(seconds=self._timeout))
        finally:
            _waiting.discard(self)
        if not (TELEMETRY.emits_debug_events() or self._telemetry.span.enabled):
            return LastArrival()
        written = guarded(read_key, self._store, self._keys.last_member)
        return LastArrival() if written is None else LastArrival.from_bytes(written)

    def _complete(self) -> LastArrival:
        """Complete the barrier, as the last rank."""
        shared, ledger = "", None
        if self._telemetry.span.enabled:
            # Before the barrier completes: the others read the shared trace from here.
            shared, ledger = guarded(self._shared_trace) or ("", None)
        last = LastArrival(self._rank, shared)
        self._store.set(self._keys.last_member, last.to_json())
        self._telemetry.arrived_last()
        if ledger is not None or not self._in_ledger:
            # A TCPStore does not acknowledge a set. If this process serves the store
            # and ends now, the others get a network error instead of their wake-up.
            # After one round trip the server has answered their waits. torch's barrier
            # does the same; the audit below makes one if it has to read the ledger.
            self._store.check([self._keys.last_member])
        if self._rank is not None:
            guarded(self._audit, ledger)
        return last

    # The rest is optional and must not fail the barrier.

    def _publish_traceparent(self) -> None:
        """Publish the trace that the other ranks join, as the first rank."""
        self._telemetry.span.begin()
        traceparent = self._telemetry.span.traceparent()
        if traceparent:
            publish_traceparent(self._store, self._keys, traceparent)

    def _shared_trace(self) -> tuple[str, Ledger]:
        """Return the trace that all ranks join: the first rank's, else this one's."""
        ledger = read_ledger(self._store, self._keys, exists=self._in_ledger)
        shared = read_traceparent(self._store, self._keys, ledger)
        if not shared:
            # The first rank runs plain torch, or has not published its trace yet.
            self._telemetry.span.begin()
            shared = self._telemetry.span.traceparent()
        return shared, ledger

    def _audit(self, ledger: Ledger | None) -> None:
        """Report a rank that was counted twice: the barrier completed too early."""
        if ledger is None and self._in_ledger:
            ledger = read_ledger(self._store, self._keys, exists=True)
        if has_duplicates(self._store, self._keys, ledger or Ledger()):
            self._report_stale(self._world_size)

    def _report_stale(self, arrived: int) -> None:
        arrivals = read_arrivals(self._store, self._keys, self._world_size)
        self._telemetry.stale(arrived, arrivals.duplicate_ranks)

    def _warn(self) -> None:
        """Start to read who is missing, unless that is under way."""
        if 0 < self._order <= _READERS and not self._warning:
            # Not waited for: a store that hangs must not hold up the watcher.
            start_bounded_thread(partial(guarded, self._read_and_warn))

    def _read_and_warn(self) -> None:
        self._warning = True
        try:
            report = self._read_while_waiting()
            if report.unseen_ranks:
                self._telemetry.waiting(report)
        finally:
            self._warning = False

    def _read_while_waiting(self) -> MissingReport:
        with (
            self._telemetry.span.suppress_call_spans(),
            side_connection(self._store) as store,
        ):
            report = self._with_findings(store, self._read_missing(store))
            if report.unseen_ranks:
                store.set(self._keys.missing_report, report.to_bytes())
            return report

    def _timed_out(self) -> BarrierTimeout:
        report = MissingReport.unknown(self._world_size)
        try:
            report = run_with_timeout(_READ_TIMEOUT, self._read_after_timeout)
            report = self._wait_for_names(report)
            run_with_timeout(_READ_TIMEOUT, lambda: self._publish(report))
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
        return self._telemetry.timed_out(
            report, self._timeout, own_names=self._decoder is not None
        )

    # Not a side connection from here on: the wait is over, so the store's own one is
    # free. A new one fails where rank 0 served the store, timed out first and exited.

    def _read_after_timeout(self) -> MissingReport:
        """Return who is missing, from another rank's report or by reading."""
        store = self._store
        with self._telemetry.span.suppress_call_spans():
            if self._rank is not None:
                confirm_arrival(store, self._keys, self._rank)
                if store.has_extended_api():
                    # Plain torch's rank 0 reads this key. Other stores have it already.
                    store.set(self._keys.trace(self._rank), "here")
            if self._order > _READERS and self._name_timeout:
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
        return 0.0 if self._rank is None else self._trace_timeout

    def _wait_for_names(self, report: MissingReport) -> MissingReport:
        deadline = time.monotonic() + self._name_timeout
        while report.unidentified_count and time.monotonic() < deadline:
            time.sleep(_READ_INTERVAL)
            report = run_with_timeout(
                _READ_TIMEOUT, lambda: self._read_missing(self._store)
            )
        return report

    def _publish(self, report: MissingReport) -> None:
        with self._telemetry.span.suppress_call_spans():
            self._store.set(self._keys.missing_report, report.to_bytes())
            if self._rank == 0:
                # Plain torch's other ranks wait for rank 0 to have read.
                self._store.set(self._keys.tracing_gate, "<val_ignored>")

    def _published_report(self, store: Any) -> MissingReport | None:
        """Return another rank's report, if no rank has arrived since."""
        if not store.check([self._keys.missing_report]):
            return None
        written = read_key(store, self._keys.missing_report)
        report = MissingReport.from_bytes(written, self._world_size)
        if report is None or report.unidentified_count:
            return None
        if self._rank in report.missing_ranks:
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
                self._examine, store, report.missing_ranks, self._world_size
            )
        return report.with_findings(findings or {})

    def _read_missing(self, store: Any) -> MissingReport:
        arrivals = read_arrivals(store, self._keys, self._world_size)
        if arrivals.arrived_count < self._order:
            # The server restarted without its data, or the file was truncated. Ranks
            # whose arrival is gone must not be named: this one is among them.
            return MissingReport.unknown(self._world_size)
        decoder = self._decoder_for(store, arrivals.unseen_ranks)
        return MissingReport.from_arrivals(arrivals, self._world_size, decoder)

    def _decoder_for(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self._decoder is not None:
            return self._decoder
        registered = guarded(rank_registry.registry_decoder, store, missing)
        roster = decoders.auto()
        return roster if registered is None else decoders.chain(registered, roster)
