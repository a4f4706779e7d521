"""One rank's barrier call: torch's barrier, and the names of missing ranks.

The keys are torch's (see `arrivals`), so traced and plain ranks meet in one barrier. A
rank that arrives writes its arrival into the ledger and adds itself to the count. The
last one sets a key, which the others wait for. While they wait, the first ranks to
arrive read who is missing and warn. At the timeout every rank knows.

The store's timeout is not changed: the one wait has its own, so other threads that use
the store are not affected.

The spans of all ranks are in one trace. Every rank derives the ids of one parent from
the job, the attempt and the prefix of the barrier, so that no rank has to wait for the
ids of another one. The spans are children of this parent. The rank that arrived first
makes it when its call ends. Where the caller is in a trace already, there is a span in
that trace too. A job is known by its run id. Without one, jobs with equal prefixes
would share traces. There the ranks agree on a random id in the store, once for each
store.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from datetime import timedelta
from functools import partial
from threading import RLock, get_ident
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import Span, Status, StatusCode
from torch.distributed import DistStoreError

from tracedstore import names
from tracedstore.common import election
from tracedstore.common.errors import (
    TIMEOUT,
    TracedStoreError,
    error_message,
    error_type,
)
from tracedstore.common.identity import is_from_torch, restart_count, run_id_of
from tracedstore.common.keys import key_text
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.common.threads import run_with_timeout, start_bounded_thread
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Examine,
    Ledger,
    Meeting,
    MissingReport,
    StalledBarrier,
    confirm_arrival,
    has_duplicates,
    last_rank,
    read_arrivals,
)
from tracedstore.coordination.rank_registry import (
    is_registered,
    register,
    registry_decoder,
)
from tracedstore.coordination.store_access import bare_store, read_key, side_connection
from tracedstore.naming import decoders
from tracedstore.recording.cold_metrics import Result
from tracedstore.recording.counters import handle_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY, SharedParent
from tracedstore.recording.watcher import WATCHER

# Seconds until a warning that never comes.
_NEVER = 1e9
# How many of the first ranks to arrive read who is missing.
READERS: Final = election.REPORTERS
# Seconds that reading may take: the store may be gone, or hang. The verdict is due
# within 5 s of the timeout.
READ_TIMEOUT: Final = 4.0
# Seconds between reads while ranks that were counted have not written their names.
_READ_INTERVAL = 0.1
# Seconds that the other ranks wait for the readers' report.
_REPORT_TIMEOUT = 1.0
# Seconds for exporting spans before `BarrierTimeout` is raised, which may end the job.
_FLUSH_TIMEOUT = 1.0
# Maximum number of ranks in a span attribute; backends cut long lists, or the span.
_MAX_RANKS_LISTED = 64
# The random id of a job without a run id. On stores without compare-and-set the first
# rank to count itself under the second key writes it.
JOB_KEY: Final = "tracedstore/JOB"
JOB_COUNT_KEY: Final = "tracedstore/JOB_COUNT"
# Seconds that the others wait for it: the first one writes it at once.
_JOB_TIMEOUT = 1.0
# What torchrun has for a run id if it is given none.
_NO_RUN_ID: Final = "none"
_MAX_JOB_BYTES = 64

# The ids of jobs without a run id. By handle, because the address of a store that was
# freed may be used for another one.
_agreed: WeakTable[bytes] = WeakTable()
# Runs an optional step of a barrier; on failure counts it and returns None.
guarded = partial(RECORDER.failures.guarded, names.BARRIERS)


class BarrierTimeout(TracedStoreError, DistStoreError):  # noqa: N818 - a public name
    """A barrier timed out; has the missing ranks.

    It is a ``DistStoreError``, so code that catches torch's exception catches this one,
    on every store. It can be pickled.

    Attributes:
        key_prefix: The key prefix of the barrier.
        rank: The rank that waited; None if the caller did not pass one.
        world_size: The number of ranks that the barrier is for.
        timeout: The timeout in seconds.
        waited: The seconds that this rank waited.
        arrived_ranks: Ranks that arrived and are identified.
        missing_ranks: Ranks that did not arrive.
        missing_names: Their names, in the same order.
        missing_causes: Why they did not arrive, in the same order: ``gone``, ``busy``,
            ``stopped``, ``not_started``; "" where it is unknown.
        missing_doing: What their processes do instead, in the same order; "" where it
            is unknown.
        missing_evidence: How that is known, in the same order; "" where nothing is.
        possibly_missing_ranks: If there were unidentified arrivals: the ranks that are
            either missing or among these arrivals. `missing_ranks` is empty then, so
            that a rank that arrived is never reported missing.
        unidentified_count: Number of arrivals without a rank.
        duplicate_ranks: Ranks that arrived more than once, because the key prefix was
            used before.
    """

    key_prefix: str
    rank: int | None
    world_size: int
    timeout: float
    waited: float
    arrived_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    missing_names: tuple[str, ...]
    missing_causes: tuple[str, ...]
    missing_doing: tuple[str, ...]
    missing_evidence: tuple[str, ...]
    possibly_missing_ranks: tuple[int, ...]
    unidentified_count: int
    duplicate_ranks: tuple[int, ...]

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (str(self), self._fields)


def _unpickle(message: str, fields: dict[str, Any]) -> BarrierTimeout:
    return BarrierTimeout(message, **fields)


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


class BarrierCall:
    """One rank's call of one barrier; a `recording.watcher.Watched`.

    A completed call is all that a healthy job makes, and its caches are cold: the way
    through it has few objects and few functions. So the call is one object. Its span
    and its event are made after it has returned (`Telemetry.defer`): they take longer
    than the barrier. Those of other calls are made at once. Telemetry that fails is
    counted, never raised.

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

    Attributes:
        traced: The call gets a span.
        observed: A span or an event is made of the call when it has completed.
        caller: The context of the caller, if the call is observed.
        job: What all ranks have in common, if the call gets a span and it is known.
        began: When the call began, in ticks.
        duration: The duration of a completed call, in ticks.
        meeting: What came of the steps of the call so far.
        ended: The call has ended.
    """

    observer = names.BARRIERS
    # Attributes of the class are those of a call that has only begun: each one that a
    # call sets takes time.
    caller: Context
    job: bytes | None = None
    duration: int
    meeting = Meeting("", None, 0, 0.0, observed=False)
    ended = False
    # Two threads may start the span: that which warns, and that which ends the call.
    _span_lock: RLock
    _span: Span | None = None
    _span_started: int
    # A thread reads who is missing.
    _warning = False

    def __init__(
        self,
        store: Any,
        world_size: int,
        key_prefix: str,
        timeout: float,
        rank: int | None,
        decoder: decoders.Decoder | None,
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
            self._span_lock = RLock()

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
        # The store calls of a barrier get no spans. They could not be children of the
        # barrier's span, which is made after the call and has no id before, so each
        # would start a trace of its own. The barrier's span covers them.
        covered = self.traced and get_ident() not in RECORDER.without_call_spans
        if covered:
            RECORDER.without_call_spans.add(get_ident())
        store = self._store
        try:
            # Before the arrival: between arrival and wait there must be no delay. The
            # last rank may serve the store, and exit as soon as it has returned. A rank
            # that has arrived and does not wait yet would find the server gone.
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
                guarded(self._end, "failed", {})
            else:
                off_main_thread(self._end_failed, error, store)
            raise
        finally:
            # A thread that warns may keep this call. It must not keep the store: a
            # store that is kept keeps its server and its port.
            self._store = None
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
            TELEMETRY.defer(self._emit_completed)

    def _introduce(self, store: Any) -> None:
        """Register the rank, and learn the job; mostly nothing is left to do."""
        if self.rank is not None and not is_registered(store, self.rank):
            guarded(register, store, self.rank, self.world_size)
        if self.traced:
            self.job = job_of(store)

    def _new_meeting(self, store: Any) -> Meeting:
        native = RECORDER.native
        if native is not None and type(store) is native.store_class:
            made: Meeting | None = store._meeting(  # noqa: SLF001
                *(self.prefix, self.rank, self.world_size),
                *(self._timeout, self.observed),
            )
            if made is not None:
                return made
        return Meeting(
            *(self.prefix, self.rank, self.world_size, self._timeout),
            observed=self.observed,
        )

    def _wait_or_complete(self, store: Any, meeting: Meeting) -> None:
        order = meeting.order
        if order == self.world_size:
            meeting.complete(store)
            return
        if order > self.world_size:
            guarded(self._report_stale, order)
        meeting.wait(store)

    def _end_failed(self, error: Exception, store: Any) -> None:
        """End a call that raised; the caller raises the error again.

        Raises:
            BarrierTimeout: In its stead, if it is the store's timeout.
        """
        if error_type(error) == TIMEOUT:
            timed_out = self._timed_out(store)
            raise timed_out from None
        # The text of a store that is not torch's may quote values.
        from_torch = is_from_torch(bare_store(store))
        kind, message = error_type(error), error_message(error) if from_torch else ""
        guarded(self._begin_span)
        self._emit(names.BARRIER_FAILED, error_type=kind, error=message)
        self._end("failed", {error_attributes.ERROR_TYPE: kind}, message)

    # Who is missing. All of this is optional and must not fail the barrier.

    def _audit(self, entries: bytes) -> None:
        """Report a rank that was counted twice: the barrier completed too early."""
        ledger = Ledger(entries)
        if self.rank is not None and has_duplicates(self._store, self._keys, ledger):
            self._report_stale(self.world_size)

    def _report_stale(self, arrived: int) -> None:
        """Emit `barrier.stale_key`: the prefix was used before."""
        arrivals = read_arrivals(self._store, self._keys, self.world_size)
        self._emit(
            names.BARRIER_STALE_KEY,
            arrived_count=arrived,
            duplicate_ranks=list(arrivals.duplicate_ranks),
        )

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
                self._emit_waiting(report)
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
            report = self._read_with_causes(store)
            if report.unseen_ranks:
                self._publish(store, report)
            return report

    def _timed_out(self, store: Any) -> BarrierTimeout:
        # Not a side connection: the wait is over, so the store's own one is free. A new
        # one fails where rank 0 served the store, timed out first and exited.
        report = MissingReport.unknown(self.world_size)
        try:
            report = run_with_timeout(
                READ_TIMEOUT, partial(self._read_after_timeout, store)
            )
            report = self._wait_for_names(store, report)
            run_with_timeout(
                READ_TIMEOUT, partial(self._publish_after_timeout, store, report)
            )
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
        return self._emit_timed_out(report)

    def _read(self, store: Any) -> MissingReport:
        """Return who is missing, by name."""
        arrivals = read_arrivals(store, self._keys, self.world_size)
        if arrivals.arrived_count < self.meeting.order:
            # The server restarted without its data, or the file was truncated. Ranks
            # whose arrival is gone must not be named: this one is among them.
            return MissingReport.unknown(self.world_size)
        decoder = self._decoder
        if decoder is None:
            registered = guarded(registry_decoder, store, arrivals.unseen_ranks)
            roster = decoders.auto()
            decoder = roster
            if registered is not None:
                decoder = decoders.chain(registered, roster)
        return arrivals.with_names(decoder)

    def _read_with_causes(self, store: Any) -> MissingReport:
        """Return who is missing and why, where that is known for certain."""
        report = self._read(store)
        if not report.missing_ranks:
            return report
        with RECORDER.unrecorded():
            findings = guarded(
                self._examine, store, report.missing_ranks, self.world_size
            )
        return report.with_findings(findings or {})

    def _read_after_timeout(self, store: Any) -> MissingReport:
        """Return who is missing, from another rank's report or by reading."""
        with RECORDER.no_call_spans():
            if self.rank is not None:
                confirm_arrival(store, self._keys, self.rank)
                if store.has_extended_api():
                    # Plain torch's rank 0 reads this key. Other stores have it already.
                    store.set(self._keys.trace(self.rank), "here")
            if self.meeting.order > READERS and self._name_timeout:
                # The first ranks to arrive time out first, or at about the same time.
                report_timeout = min(_REPORT_TIMEOUT, self._name_timeout)
                with suppress(Exception):
                    store.wait(
                        [self._keys.missing_report], timedelta(seconds=report_timeout)
                    )
                published = self._published(store)
                if published is not None:
                    return published
            return self._read_with_causes(store)

    def _wait_for_names(self, store: Any, report: MissingReport) -> MissingReport:
        """Read again while ranks that were counted have not written their names."""
        deadline = time.monotonic() + self._name_timeout
        while report.unidentified_count and time.monotonic() < deadline:
            time.sleep(_READ_INTERVAL)
            report = run_with_timeout(READ_TIMEOUT, partial(self._read, store))
        return report

    @property
    def _name_timeout(self) -> float:
        """Seconds for ranks that arrived without a name to write it.

        Where this rank has no name either, torch's barrier does not wait, nor does
        this one.
        """
        return 0.0 if self.rank is None else self._trace_timeout

    def _published(self, store: Any) -> MissingReport | None:
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

    def _publish_after_timeout(self, store: Any, report: MissingReport) -> None:
        with RECORDER.no_call_spans():
            self._publish(store, report)
            if self.rank == 0:
                # Plain torch's other ranks wait for rank 0 to have read.
                store.set(self._keys.tracing_gate, "<val_ignored>")

    def _publish(self, store: Any, report: MissingReport) -> None:
        store.set(self._keys.missing_report, report.to_bytes())

    # Gauges, events, and the exception.

    def _emit_waiting(self, report: MissingReport) -> None:
        """Set the gauges and emit `barrier.waiting`, unless the call has ended."""
        stalled = StalledBarrier(
            family=self._family,
            arrived=report.arrived_count,
            missing=dict(zip(report.missing_ranks, report.missing_names, strict=True)),
            possible=report.missing_count if report.possibly_missing_ranks else 0,
            causes=dict(zip(report.missing_ranks, report.missing_causes, strict=True)),
        )
        if not RECORDER.cold.begin(self, stalled, lambda: not self.ended):
            return
        self._begin_span()
        self._emit(names.BARRIER_WAITING, **report.event_fields())

    def _emit_completed(self) -> None:
        """Make the span and the event of a completed call, a moment later."""
        # In the caller's context, which has its trace and its structlog variables. A
        # copy: the span enters it too.
        self.caller.copy().run(self._emit_completed_in_context)

    def _emit_completed_in_context(self) -> None:
        last = last_rank(self.meeting.last or b"")
        self._end_span(
            "completed",
            self.duration,
            {} if last is None else {names.BARRIER_LAST_RANK: last},
        )
        if TELEMETRY.emits_debug_events():
            self._emit(
                names.BARRIER_COMPLETED,
                last_rank=last,
                arrival_order=self.meeting.order,
                completed_at=RECORDER.clock.wall_of(self.began + self.duration) / 1e9,
                waited_seconds=round(self.duration / 1e9, 6),
            )

    def _emit_timed_out(self, report: MissingReport) -> BarrierTimeout:
        """Emit `barrier.timeout`, end the call and return the exception to raise."""
        guarded(self._begin_span)
        self._emit(
            names.BARRIER_TIMEOUT,
            **report.event_fields(),
            timeout_seconds=self._timeout,
        )
        error = self._exception(report)
        self._end(
            "timeout",
            {
                error_attributes.ERROR_TYPE: TIMEOUT,
                names.BARRIER_ARRIVED_COUNT: report.arrived_count,
                names.BARRIER_MISSING_COUNT: report.missing_count,
                names.BARRIER_MISSING_RANKS: report.missing_ranks[:_MAX_RANKS_LISTED],
                names.BARRIER_MISSING_TEXT: report.describe(),
            },
            error_message(error),
        )
        if self.traced:
            guarded(TELEMETRY.flush, _FLUSH_TIMEOUT)
        return error

    def _exception(self, report: MissingReport) -> BarrierTimeout:
        shown: Sequence[str] = report.missing_names
        if self._decoder is None:
            # torch's default decoder is str().
            shown = [
                str(rank)
                if name == decoders.default_name(rank)
                else f"{rank} on {name}"
                for rank, name in zip(report.missing_ranks, shown, strict=True)
            ]
        # torch's text, for those who search logs for it.
        text = (
            f"Timed out waiting on barrier on rank {self.rank}, for key prefix:"
            f" {self.prefix} (world_size={self.world_size},"
            f" missing_ranks=[{', '.join(shown)}], timeout={self._timeout})"
        )
        return BarrierTimeout(
            f"{text}: {report.describe()}",
            key_prefix=self.prefix,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
            waited=self._waited(),
            arrived_ranks=report.arrived_ranks,
            missing_ranks=report.missing_ranks,
            missing_names=report.missing_names,
            missing_causes=report.missing_causes,
            missing_doing=report.missing_doing,
            missing_evidence=report.missing_evidence,
            possibly_missing_ranks=report.possibly_missing_ranks,
            unidentified_count=report.unidentified_count,
            duplicate_ranks=report.duplicate_ranks,
        )

    def _end(
        self, result: Result, attributes: Mapping[str, Any], error: str | None = None
    ) -> None:
        """End a call that did not complete."""
        duration = RECORDER.ticks() - self.began
        self.ended = True
        RECORDER.cold.record(
            (names.BARRIER_DURATION, (self.prefix, result), duration),
            (names.BARRIER_LAST_ARRIVALS, (self.prefix,), self.meeting.is_last),
        )
        self._end_span(result, duration, attributes, error)

    def _waited(self) -> float:
        return (RECORDER.ticks() - self.began) / 1e9

    @property
    def _shown(self) -> str:
        return key_text(self.prefix)

    @property
    def _family(self) -> str:
        return RECORDER.cold.label_value("barrier", self.prefix)

    def _emit(self, event: str, **fields: Any) -> None:
        fields.setdefault("waited_seconds", round(self._waited(), 6))
        guarded(
            TELEMETRY.emit,
            event,
            # In reading order: which barrier, who is missing, how long, the rest.
            barrier=self._shown,
            **fields,
            **({} if self.rank is None else {"rank": self.rank}),
            world_size=self.world_size,
            barrier_family=self._family,
            **self._span_ids(),
        )

    # The span, if the call gets one.

    def _begin_span(self) -> None:
        """Start the span, unless it is started: an event is about to have its ids."""
        if not self.traced:
            return
        with self._span_lock:
            if self._span is None:
                self._span = self._new_span({})

    def _span_ids(self) -> dict[str, str]:
        """Return the trace and span ids for an event of this call."""
        found = None if self._span is None else self._span.get_span_context()
        if found is None or not (found.is_valid and found.trace_flags.sampled):
            return {}
        return {
            "trace_id": trace.format_trace_id(found.trace_id),
            "span_id": trace.format_span_id(found.span_id),
        }

    def _end_span(
        self,
        result: Result,
        duration: int,
        attributes: Mapping[str, Any],
        error: str | None = None,
    ) -> None:
        if not self.traced:
            return
        meeting = self.meeting
        arrival = {
            names.BARRIER_ARRIVAL_ORDER: meeting.order,
            names.BARRIER_ARRIVAL: (meeting.arrived - self.began) / 1e9,
        }
        guarded(
            self._finish_span,
            duration,
            {
                names.BARRIER_RESULT: result,
                **(arrival if meeting.order else {}),
                **attributes,
            },
            error,
        )

    def _finish_span(
        self, duration: int, attributes: dict[str, Any], error: str | None
    ) -> None:
        """End the span, this long after its start; start it if it is not started."""
        with self._span_lock:
            if self._span is None:
                self._span = self._new_span(attributes)
            else:
                self._span.set_attributes(attributes)
        if self._span is None:
            return
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._span_started + duration)
        if self.job is not None and self.meeting.order == 1:
            of_rank = (names.BARRIER_ARRIVAL_ORDER, names.BARRIER_ARRIVAL)
            TELEMETRY.add_shared_span(
                shared_parent(self.job, self.prefix),
                f"barrier {self._family}",
                attributes={
                    names.BARRIER_ROOT: True,
                    names.BARRIER_PREFIX: self._shown,
                    names.WORLD_SIZE: self.world_size,
                    **{k: v for k, v in attributes.items() if k not in of_rank},
                },
                started_ns=self._span_started,
                ended_ns=self._span_started + duration,
                parent=self.caller.run(context.get_current),
            )

    def _new_span(self, more: Mapping[str, Any]) -> Span | None:
        shown = self._shown
        self._span_started = RECORDER.clock.wall_of(self.began)
        return TELEMETRY.start_span(
            f"barrier {RECORDER.cold.label_value('barrier', shown)}",
            attributes={
                names.BARRIER_PREFIX: shown,
                names.WORLD_SIZE: self.world_size,
                **({} if self.rank is None else {names.RANK: self.rank}),
                **more,
            },
            started_ns=self._span_started,
            parent=self.caller.run(context.get_current),
            shared=None if self.job is None else shared_parent(self.job, self.prefix),
        )


def job_of(store: Any) -> bytes | None:
    """Return what all ranks of this job and attempt have in common, and no other job.

    Makes calls of the store only if there is no run id, and once for each store.

    Args:
        store: The store through which the ranks meet.

    Returns:
        None if the ranks could not agree on an id.
    """
    run_id = run_id_of(os.environ)
    if run_id is not None and run_id != _NO_RUN_ID:
        return f"{run_id}\0{restart_count(os.environ)}".encode("utf-8", "replace")
    known = _agreed.get(handle_of(store))
    if known is None:
        agreed = RECORDER.failures.guarded_call(
            names.BARRIERS, _agree, store, os.urandom(16).hex()
        )
        # Also if it failed: that is not tried again at every barrier.
        known = (agreed or b"")[:_MAX_JOB_BYTES]
        _agreed.set(handle_of(store), known)
    return known or None


def _agree(store: Any, own: str) -> bytes:
    """Write an id, unless another rank has; return the one that is written."""
    agreed: bytes
    if store.has_extended_api():
        agreed = store.compare_set(JOB_KEY, "", own)
        return agreed
    if store.add(JOB_COUNT_KEY, 1) == 1:
        store.set(JOB_KEY, own)
        return own.encode()
    store.wait([JOB_KEY], timedelta(seconds=_JOB_TIMEOUT))
    agreed = store.get(JOB_KEY)
    return agreed


def shared_parent(job: bytes, prefix: str) -> SharedParent:
    """Derive the ids of the parent that the spans of all ranks have.

    Args:
        job: What the ranks have in common.
        prefix: Prefix of the barrier's keys.
    """
    digest = hashlib.sha256(b"%b\0%b" % (job, prefix.encode("utf-8", "replace")))
    ids = digest.digest()
    return SharedParent(int.from_bytes(ids[:16]), int.from_bytes(ids[16:24]))
