"""The barrier that says who is missing: torch's own, with names.

The keys are torch's (see `protocol`), so traced and plain ranks meet in one barrier.
A rank that arrives signs the ledger and counts itself; the last one says so; the
others wait for that. While they wait, the first to have arrived look who is missing
and warn; at the timeout everybody knows.

The store's own timeout is left alone: the one wait there is has a timeout of its own,
so other threads that use the store do not notice.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from tracedstore import names
from tracedstore.coordination import decoders, rank_registry
from tracedstore.coordination.arrivals import (
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
from tracedstore.coordination.missing_report import MissingReport
from tracedstore.coordination.protocol import BarrierKeys, LastArrival, Ledger
from tracedstore.coordination.watch import BarrierWatch, Waiting
from tracedstore.core.errors import TIMEOUT, error_type
from tracedstore.core.recorder import RECORDER
from tracedstore.core.timeouts import run_with_timeout

WATCH: Final = BarrierWatch(RECORDER)

# How many of those that arrived first look who is missing. One may die of it; ten
# thousand would storm the store.
_LOOKERS = 2
# How often to read_arrivals again for names of ranks that were counted without one.
_LOOK_AGAIN = 0.1
# Seconds that looking may take: the store may be gone, or hang.
_LOOK_WITHIN = 5.0
# Seconds that the others give those that read_arrivals to say what they found.
_VERDICT_WITHIN = 1.0


def barrier(
    store: AnyStore,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
    *,
    warn_after: float = 30,
) -> None:
    """Wait until all ranks are here, and say who is not.

    A drop-in for ``torch.distributed.elastic.utils.store.barrier``, on every store.
    A prefix is for one use.

    Args:
        store: Through which the ranks meet; need not be traced.
        world_size: How many ranks there are.
        key_prefix: What the barrier's keys begin with.
        barrier_timeout: Seconds to wait.
        rank: Which rank this is. Without it others cannot name it.
        rank_tracing_decoder: Turns a rank into a name; by default what the ranks
            registered, else what the scheduler's environment says.
        trace_timeout: Seconds to give ranks that arrived without a name to write it.
        warn_after: Seconds after which `barrier.waiting` is told, if this rank is
            among the first; told again each time the wait has doubled. 0 for never.

    Raises:
        BarrierTimeout: Some rank did not come in time.
        AssertionError: A decoder was given, and no rank.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    visit = _Visit(
        store,
        world_size,
        BarrierKeys(key_prefix),
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
    )
    RECORDER.set_up()
    visit.make(warn_after)


class _Visit:
    """One rank's visit of one barrier."""

    def __init__(
        self,
        store: AnyStore,
        world_size: int,
        keys: BarrierKeys,
        timeout: float,
        rank: int | None,
        decoder: Callable[[int], str] | None,
        trace_timeout: float,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._keys = keys
        self._timeout = timeout
        self._rank = rank
        self._decoder = decoder
        self._trace_timeout = trace_timeout
        self._in_ledger = False
        self._told = BarrierTelemetry(keys.prefix, rank, world_size)

    def make(self, warn_after: float) -> None:
        """Arrive, wait for the others, and tell how it was."""
        place = 0
        with self._told.span.suppress_call_spans():
            try:
                place = self._arrive()
                last = self._wait(place, warn_after)
            except Exception as error:
                if error_type(error) != TIMEOUT:
                    self._told.failed(error)
                    raise
                timeout = self._timed_out(place)
                raise timeout from None
            self._told.completed(last)

    def _arrive(self) -> int:
        if self._rank is not None:
            guarded(rank_registry.register, self._store, self._rank, self._world_size)
            self._in_ledger = bool(
                guarded(record_arrival, self._store, self._keys, self._rank)
            )
        place: int = self._store.add(self._keys.num_members, 1)
        self._told.arrived(place)
        if place > self._world_size:
            guarded(self._stale, place)
        elif place == 1 < self._world_size and self._told.span.wanted:
            guarded(self._lead)
        return place

    def _wait(self, place: int, warn_after: float) -> LastArrival:
        """Wait for the last one; give what it said."""
        if place == self._world_size:
            return self._complete()
        watched = None
        if warn_after > 0 and place <= _LOOKERS:
            watched = Waiting(self._warn, warn_after)
            guarded(WATCH.add, watched)
        try:
            self._store.wait([self._keys.last_member], timedelta(seconds=self._timeout))
        finally:
            if watched is not None:
                WATCH.remove(watched)
        if not (RECORDER.detailed() or self._told.span.wanted):
            return LastArrival()
        written = guarded(read_key, self._store, self._keys.last_member)
        return LastArrival() if written is None else LastArrival.from_bytes(written)

    def _complete(self) -> LastArrival:
        """Let the others go, as the last one."""
        shared, ledger = "", None
        if self._told.span.wanted:
            # Before the others go, because they learn from this one where to belong.
            shared, ledger = guarded(self._shared) or ("", None)
        last = LastArrival(self._rank, shared)
        self._store.set(self._keys.last_member, last.to_json())
        self._told.record_last_arrival()
        if self._rank is not None:
            guarded(self._audit, ledger)
        return last

    # What follows may not fail the barrier.

    def _lead(self) -> None:
        """Leave a trace for the others to join, as the first one."""
        self._told.span.begin()
        traceparent = self._told.span.traceparent()
        if traceparent:
            publish_traceparent(self._store, self._keys, traceparent)

    def _shared(self) -> tuple[str, Ledger]:
        """Find the trace that all belong to: the first one's, else this one's."""
        ledger = read_ledger(self._store, self._keys, exists=self._in_ledger)
        shared = read_traceparent(self._store, self._keys, ledger)
        if not shared:
            # The first one is plain torch's, or came just now.
            self._told.span.begin()
            shared = self._told.span.traceparent()
        return shared, ledger

    def _audit(self, ledger: Ledger | None) -> None:
        """Tell if a rank was counted twice, and the barrier let go too early."""
        if ledger is None and self._in_ledger:
            ledger = read_ledger(self._store, self._keys, exists=True)
        if has_duplicates(self._store, self._keys, ledger or Ledger()):
            self._stale(self._world_size)

    def _stale(self, arrived: int) -> None:
        found = read_arrivals(self._store, self._keys, self._world_size)
        self._told.stale(arrived, found.duplicate_ranks)

    def _warn(self) -> None:
        finding = run_with_timeout(_LOOK_WITHIN, self._look_beside)
        if finding.unseen_ranks:
            self._told.waiting(finding)

    def _look_beside(self) -> MissingReport:
        with (
            self._told.span.suppress_call_spans(),
            side_connection(self._store) as store,
        ):
            finding = self._find(store)
            if finding.unseen_ranks:
                store.set(self._keys.missing_report, finding.to_bytes())
            return finding

    def _timed_out(self, place: int) -> BarrierTimeout:
        try:
            patience = self._trace_timeout + _LOOK_WITHIN
            finding = run_with_timeout(patience, lambda: self._look_at_the_end(place))
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
            finding = MissingReport.unknown(self._world_size)
        return self._told.timed_out(
            finding, self._timeout, own_names=self._decoder is not None
        )

    def _look_at_the_end(self, place: int) -> MissingReport:
        # Not beside it: the wait is over, so its connection is free. Another one could
        # not be had where rank 0 served the store, gave up first, and is gone.
        store = self._store
        with self._told.span.suppress_call_spans():
            if self._rank is not None and store.has_extended_api():
                # Where plain torch's rank 0 looks for us; elsewhere it is there.
                store.set(self._keys.trace(self._rank), "here")
            finding = self._settled(store, place)
            if self._rank == 0:
                # Plain torch's other ranks wait for this one to have looked.
                store.set(self._keys.tracing_gate, "<val_ignored>")
        return finding

    def _settled(self, store: Any, place: int) -> MissingReport:
        """Find out who is missing, from somebody who has or by looking.

        Those that arrived without a name get until trace_timeout to write it; where
        this rank has none either, torch's barrier would not wait, and nor does this.
        """
        trace_timeout = 0.0 if self._rank is None else self._trace_timeout
        if place > _LOOKERS and trace_timeout:
            # The first to arrive time out first, or at about the same time.
            patience = min(_VERDICT_WITHIN, trace_timeout)
            with suppress(Exception):
                store.wait([self._keys.missing_report], timedelta(seconds=patience))
            verdict = self._verdict(store)
            if verdict is not None:
                return verdict
        deadline = time.monotonic() + trace_timeout
        while True:
            finding = self._find(store)
            if not finding.unidentified_count or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN)
        store.set(self._keys.missing_report, finding.to_bytes())
        return finding

    def _verdict(self, store: Any) -> MissingReport | None:
        """Read what somebody found, if that still holds."""
        if not store.check([self._keys.missing_report]):
            return None
        written = read_key(store, self._keys.missing_report)
        found = MissingReport.from_bytes(written, self._world_size)
        if found is None or found.unidentified_count:
            return None
        if found.arrived_count != store.add(self._keys.num_members, 0):
            return None
        return found if self._decoder is None else found.with_names(self._decoder)

    def _find(self, store: Any) -> MissingReport:
        arrivals = read_arrivals(store, self._keys, self._world_size)
        names_of = self._names(store, arrivals.unseen_ranks)
        return MissingReport.from_arrivals(arrivals, self._world_size, names_of)

    def _names(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self._decoder is not None:
            return self._decoder
        known = guarded(rank_registry.registry_decoder, store, missing)
        roster = decoders.auto()
        return roster if known is None else decoders.chain(known, roster)


def reset() -> None:
    """Be the child's: nothing watched, nobody registered."""
    WATCH.reset()
    rank_registry.reset()
