"""Gauges, span, events and exception of one rank's barrier call.

The span and the event of a completed barrier are made after the call has returned
(`Telemetry.defer`): they take longer than the barrier. All others are made at once.
"""

from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from opentelemetry.semconv.attributes import error_attributes

from tracedstore import names
from tracedstore.common.errors import TIMEOUT, error_message, error_type
from tracedstore.common.keys import key_text
from tracedstore.coordination.barrier_timeout import BarrierTimeout, torch_message
from tracedstore.coordination.meeting import AnyMeeting, Meeting
from tracedstore.coordination.missing_report import MissingReport, StalledBarrier
from tracedstore.coordination.protocol import last_rank
from tracedstore.coordination.trace_context import NO_SPAN, BarrierSpan
from tracedstore.naming import decoders
from tracedstore.recording.cold_metrics import Result
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY, Telemetry

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
    meeting: AnyMeeting = Meeting("", None, 0, 0.0, observed=False)
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
