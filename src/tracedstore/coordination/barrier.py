"""One rank's barrier call: torch's barrier, and the names of missing ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any, Final

from opentelemetry.semconv.attributes import error_attributes
from torch.distributed import DistStoreError

from tracedstore import names
from tracedstore.common import election
from tracedstore.common.errors import (
    TIMEOUT,
    TracedStoreError,
    error_message,
    error_type,
)
from tracedstore.common.identity import is_from_torch
from tracedstore.common.keys import key_text
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.common.timeouts import run_with_timeout, start_bounded_thread
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    Meeting,
    confirm_arrival,
    has_duplicates,
    last_rank,
    read_arrivals,
)
from tracedstore.coordination.missing_report import (
    Examine,
    MissingReport,
    StalledBarrier,
)
from tracedstore.coordination.rank_registry import (
    is_registered,
    register,
    registry_decoder,
)
from tracedstore.coordination.store_access import bare_store, read_key, side_connection
from tracedstore.coordination.trace_context import NO_SPAN, BarrierSpan, job_of
from tracedstore.naming import decoders
from tracedstore.recording.cold_metrics import Result
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY, Telemetry
from tracedstore.recording.watcher import WATCHER


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


def torch_message(
    key_prefix: str,
    rank: int | None,
    world_size: int,
    missing_names: Sequence[str],
    timeout: float,
) -> str:
    """Return torch's text for a barrier timeout, for those who search logs for it."""
    return (
        f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
        f"(world_size={world_size}, missing_ranks=[{', '.join(missing_names)}], "
        f"timeout={timeout})"
    )


# Seconds for exporting spans before `BarrierTimeout` is raised, which may end the job.
_FLUSH_TIMEOUT = 1.0
# Maximum number of ranks in a span attribute; backends cut long lists, or the span.
_MAX_RANKS_LISTED = 64
# Runs an optional step of a barrier; on failure counts it and returns None.
guarded = partial(RECORDER.failures.guarded, names.BARRIERS)
guarded_call = partial(RECORDER.failures.guarded_call, names.BARRIERS)


class BarrierTelemetry:
    """Emits the telemetry of one barrier call. Failures are counted, never raised.

    The call itself is of a subclass, so that it is one object. It sets the attributes.

    Attributes:
        telemetry: What it emits through.
        prefix: Prefix of the barrier's keys.
        rank: The rank of this process, where it is known.
        world_size: Number of ranks.
        traced: The call gets a span.
        caller: The context of the caller, if the call is observed.
        job: What all ranks have in common, if the call gets a span and it is known.
        observed: A span or an event is made of the call when it has completed.
        began: When the call began, in ticks.
        duration: The duration of a completed call, in ticks.
        meeting: What came of the steps of the call so far.
        ended: The call has ended.
    """

    # Attributes of the class are those of a call that has only begun: each one that a
    # call sets takes time.
    telemetry: Telemetry = TELEMETRY
    prefix: str
    rank: int | None
    world_size: int
    traced: bool
    caller: Context
    job: bytes | None = None
    observed: bool
    began: int
    duration: int
    meeting: Meeting = Meeting("", None, 0, 0.0, observed=False)
    ended = False
    _span: BarrierSpan | None = None

    @property
    def span(self) -> BarrierSpan:
        """The span of the call; made when it is needed, mostly after the call."""
        if not self.traced:
            return NO_SPAN
        if self._span is None:
            made = BarrierSpan(
                *(self.telemetry, self.job, self.prefix, self.rank),
                *(self.world_size, self.began, self.caller),
            )
            # Atomic: the watcher may make one at the same time, and the first counts.
            vars(self).setdefault("_span", made)
        return self._span or NO_SPAN

    @property
    def _shown(self) -> str:
        return key_text(self.prefix)

    @property
    def _family(self) -> str:
        return RECORDER.cold.label_value("barrier", self.prefix)

    def emit_stale(self, arrived: int, duplicate_ranks: Sequence[int]) -> None:
        """Emit `barrier.stale_key`: the prefix was used before."""
        self._emit(
            names.BARRIER_STALE_KEY,
            arrived_count=arrived,
            duplicate_ranks=list(duplicate_ranks),
        )

    def emit_waiting(self, report: MissingReport) -> None:
        """Set the gauges and emit `barrier.waiting`, unless the call has ended."""
        stalled = StalledBarrier(
            family=self._family,
            arrived=report.arrived_count,
            missing=dict(zip(report.missing_ranks, report.missing_names, strict=True)),
            possible=report.missing_count if report.possibly_missing_ranks else 0,
        )
        if not RECORDER.cold.begin(self, stalled, lambda: not self.ended):
            return
        self.span.begin()
        self._emit(names.BARRIER_WAITING, **report.event_fields())

    def emit_completed(self) -> None:
        """Make the span and the event of a completed call, a moment later."""
        # In the caller's context, which has its trace and its structlog variables. A
        # copy: the span enters it too.
        self.caller.copy().run(self._emit_completed)

    def _emit_completed(self) -> None:
        last = last_rank(self.meeting.last or b"")
        self._end_span(
            "completed",
            self.duration,
            {} if last is None else {names.BARRIER_LAST_RANK: last},
        )
        if self.telemetry.emits_debug_events():
            self._emit(
                names.BARRIER_COMPLETED,
                last_rank=last,
                arrival_order=self.meeting.order,
                completed_at=RECORDER.clock.wall_of(self.began + self.duration) / 1e9,
                waited_seconds=round(self.duration / 1e9, 6),
            )

    def emit_failed(self, error: Exception, *, from_torch: bool) -> None:
        """Emit `barrier.failed` and end the call; the caller raises the error.

        Args:
            error: The store's exception.
            from_torch: The store is torch's; another one may quote values in its text.
        """
        kind, message = error_type(error), error_message(error) if from_torch else ""
        guarded(self.span.begin)
        self._emit(names.BARRIER_FAILED, error_type=kind, error=message)
        self._end("failed", {error_attributes.ERROR_TYPE: kind}, message)

    def end_interrupted(self) -> None:
        """End a call that an interrupt ended, such as KeyboardInterrupt."""
        self._end("failed", {})

    def emit_timed_out(
        self, report: MissingReport, timeout: float, *, own_names: bool
    ) -> BarrierTimeout:
        """Emit `barrier.timeout`, end the call and return the exception to raise.

        Args:
            report: Who is missing.
            timeout: The barrier's timeout in seconds.
            own_names: The caller's own decoder named the ranks.
        """
        guarded(self.span.begin)
        self._emit(
            names.BARRIER_TIMEOUT, **report.event_fields(), timeout_seconds=timeout
        )
        error = self._exception(report, timeout, own_names=own_names)
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
            guarded(self.telemetry.flush, _FLUSH_TIMEOUT)
        return error

    def _exception(
        self, report: MissingReport, timeout: float, *, own_names: bool
    ) -> BarrierTimeout:
        shown: Sequence[str] = report.missing_names
        if not own_names:
            # torch's default decoder is str().
            shown = [
                str(rank)
                if name == decoders.default_name(rank)
                else f"{rank} on {name}"
                for rank, name in zip(report.missing_ranks, shown, strict=True)
            ]
        text = torch_message(self.prefix, self.rank, self.world_size, shown, timeout)
        return BarrierTimeout(
            f"{text}: {report.describe()}",
            key_prefix=self.prefix,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
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
        duration = RECORDER.ticks() - self.began
        self.ended = True
        RECORDER.cold.record(
            (names.BARRIER_DURATION, (self.prefix, result), duration),
            (names.BARRIER_LAST_ARRIVALS, (self.prefix,), self.meeting.is_last),
        )
        self._end_span(result, duration, attributes, error)

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
            self.span.end,
            duration,
            {
                names.BARRIER_RESULT: result,
                **(arrival if meeting.order else {}),
                **attributes,
            },
            error,
        )

    def _waited(self) -> float:
        return (RECORDER.ticks() - self.began) / 1e9

    def _emit(self, event: str, **fields: Any) -> None:
        fields.setdefault("waited_seconds", round(self._waited(), 6))
        guarded(
            self.telemetry.emit,
            event,
            # In reading order: which barrier, who is missing, how long, the rest.
            barrier=self._shown,
            **fields,
            **({} if self.rank is None else {"rank": self.rank}),
            world_size=self.world_size,
            barrier_family=self._family,
            **self.span.ids(),
        )


# How many of the first ranks to arrive read who is missing.
READERS: Final = election.REPORTERS
# Seconds that reading may take: the store may be gone, or hang. The verdict is due
# within 5 s of the timeout.
READ_TIMEOUT: Final = 4.0
# Seconds between reads while ranks that were counted have not written their names.
_READ_INTERVAL = 0.1
# Seconds that the other ranks wait for the readers' report.
_REPORT_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReader:
    """Reads who is missing, for one rank that has arrived.

    Attributes:
        keys: The keys of the barrier.
        rank: The rank, where it is known.
        world_size: Number of ranks.
        order: The position of its arrival, from 1; 0 if it is unknown.
        decoder: Returns the name of a rank, where the caller gave one.
        trace_timeout: Seconds for ranks that arrived without a name to write it.
        examine: Finds out why ranks do not arrive.
    """

    keys: BarrierKeys
    rank: int | None
    world_size: int
    order: int
    decoder: Callable[[int], str] | None
    trace_timeout: float
    examine: Examine

    def read(self, store: Any) -> MissingReport:
        """Return who is missing and why, where that is known for certain."""
        report = self._read(store)
        if not report.missing_ranks:
            return report
        with RECORDER.unrecorded():
            findings = guarded(
                self.examine, store, report.missing_ranks, self.world_size
            )
        return report.with_findings(findings or {})

    def read_after_timeout(self, store: Any) -> MissingReport:
        """Return who is missing, from another rank's report or by reading."""
        with RECORDER.no_call_spans():
            if self.rank is not None:
                confirm_arrival(store, self.keys, self.rank)
                if store.has_extended_api():
                    # Plain torch's rank 0 reads this key. Other stores have it already.
                    store.set(self.keys.trace(self.rank), "here")
            if self.order > READERS and self._name_timeout:
                # The first ranks to arrive time out first, or at about the same time.
                report_timeout = min(_REPORT_TIMEOUT, self._name_timeout)
                with suppress(Exception):
                    store.wait(
                        [self.keys.missing_report], timedelta(seconds=report_timeout)
                    )
                published = self._published(store)
                if published is not None:
                    return published
            return self.read(store)

    def wait_for_names(self, store: Any, report: MissingReport) -> MissingReport:
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
        return 0.0 if self.rank is None else self.trace_timeout

    def _published(self, store: Any) -> MissingReport | None:
        """Return another rank's report, if no rank has arrived since."""
        if not store.check([self.keys.missing_report]):
            return None
        written = read_key(store, self.keys.missing_report)
        report = MissingReport.from_bytes(written, self.world_size)
        if report is None or report.unidentified_count:
            return None
        if self.rank in report.missing_ranks:
            return None
        if report.arrived_count != store.add(self.keys.num_members, 0):
            return None
        return report if self.decoder is None else report.with_names(self.decoder)

    def _read(self, store: Any) -> MissingReport:
        arrivals = read_arrivals(store, self.keys, self.world_size)
        if arrivals.arrived_count < self.order:
            # The server restarted without its data, or the file was truncated. Ranks
            # whose arrival is gone must not be named: this one is among them.
            return MissingReport.unknown(self.world_size)
        decoder = self._decoder_for(store, arrivals.unseen_ranks)
        return MissingReport.from_arrivals(arrivals, self.world_size, decoder)

    def _decoder_for(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self.decoder is not None:
            return self.decoder
        registered = guarded(registry_decoder, store, missing)
        roster = decoders.auto()
        return roster if registered is None else decoders.chain(registered, roster)


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
        store: Any,
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

    def _introduce(self, store: Any) -> None:
        """Register the rank, and learn the job; mostly nothing is left to do."""
        if self.rank is not None and not is_registered(store, self.rank):
            guarded(register, store, self.rank, self.world_size)
        if self.traced:
            self.job = job_of(store)

    def _end_failed(self, error: Exception, store: Any) -> None:
        """End a call that raised; the caller raises the error again.

        Raises:
            BarrierTimeout: In its stead, if it is the store's timeout.
        """
        if error_type(error) == TIMEOUT:
            timed_out = self._timed_out(store)
            raise timed_out from None
        from_torch = is_from_torch(bare_store(store))
        self.emit_failed(error, from_torch=from_torch)

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

    def _timed_out(self, store: Any) -> BarrierTimeout:
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

    def _publish_after_timeout(self, store: Any, report: MissingReport) -> None:
        with RECORDER.no_call_spans():
            self._publish(store, report)
            if self.rank == 0:
                # Plain torch's other ranks wait for rank 0 to have read.
                store.set(self._keys.tracing_gate, "<val_ignored>")

    def _publish(self, store: Any, report: MissingReport) -> None:
        store.set(self._keys.missing_report, report.to_bytes())
