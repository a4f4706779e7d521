"""Gauges, span, events and exception of one rank's barrier call."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from opentelemetry.semconv.attributes import error_attributes

from tracedstore import names
from tracedstore.coordination import decoders
from tracedstore.coordination.barrier_timeout import BarrierTimeout, torch_message
from tracedstore.coordination.missing_report import MissingReport
from tracedstore.coordination.protocol import LastArrival
from tracedstore.coordination.trace_context import BarrierSpan
from tracedstore.core.barrier_stats import Result, StalledBarrier
from tracedstore.core.errors import TIMEOUT, error_message, error_type
from tracedstore.core.keys import printable
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import Telemetry

# Seconds for exporting spans before `BarrierTimeout` is raised, which may end the job.
_FLUSH_TIMEOUT = 1.0
# Maximum number of ranks in a span attribute; backends cut long lists, or the span.
_MAX_RANKS_LISTED = 64
# Runs an optional step of a barrier; on failure counts it and returns None.
guarded = partial(RECORDER.failures.guarded, names.BARRIERS)


class BarrierTelemetry:
    """Emits the telemetry of one barrier call. Failures are counted, never raised.

    Attributes:
        span: The span of the call.
    """

    def __init__(
        self, telemetry: Telemetry, prefix: str, rank: int | None, world_size: int
    ) -> None:
        self._telemetry = telemetry
        self._prefix = prefix
        self._shown = printable(prefix)
        self._rank = rank
        self._world_size = world_size
        self._started = RECORDER.ticks()
        self._order = 0
        self._arrival = 0.0
        self._family = RECORDER.families.of(self._shown)
        self._call = RECORDER.barriers.begin()
        self.span = BarrierSpan(
            telemetry,
            self._family,
            {
                names.BARRIER_PREFIX: self._shown,
                names.WORLD_SIZE: world_size,
                **({} if rank is None else {names.RANK: rank}),
            },
        )

    def arrived(self, order: int) -> None:
        """Record that the store counted this rank, and its position."""
        self._order = order
        self._arrival = self._waited()

    def arrived_last(self) -> None:
        """Count that this rank arrived last."""
        RECORDER.barriers.record_last_arrival(self._family)

    def stale(self, arrived: int, duplicate_ranks: Sequence[int]) -> None:
        """Emit `barrier.stale_key`: the prefix was used before."""
        self._emit(
            names.BARRIER_STALE_KEY,
            arrived_count=arrived,
            duplicate_ranks=list(duplicate_ranks),
        )

    def waiting(self, report: MissingReport) -> None:
        """Set the gauges and emit `barrier.waiting`, unless the call has ended."""
        stalled = StalledBarrier(
            family=self._family,
            arrived=report.arrived_count,
            missing=dict(zip(report.missing_ranks, report.missing_names, strict=True)),
            possible=report.missing_count if report.possibly_missing_ranks else 0,
        )
        if not RECORDER.barriers.record_stall(self._call, stalled):
            return
        self.span.begin(report.traceparent)
        self._emit(names.BARRIER_WAITING, **report.event_fields())

    def completed(self, last: LastArrival) -> None:
        """End the call as completed."""
        if self.span.enabled:
            guarded(self.span.begin, last.traceparent)
            guarded(self.span.join, last.traceparent)
        self._end(
            "completed",
            {} if last.rank is None else {names.BARRIER_LAST_RANK: last.rank},
        )
        if self._telemetry.emits_debug_events():
            self._emit(
                names.BARRIER_COMPLETED,
                last_rank=last.rank,
                arrival_order=self._order,
            )

    def failed(self, error: Exception, *, from_torch: bool) -> None:
        """Emit `barrier.failed` and end the call; the caller raises the error.

        Args:
            error: The store's exception.
            from_torch: The store is torch's; another one may quote values in its text.
        """
        kind, message = error_type(error), error_message(error) if from_torch else ""
        guarded(self.span.begin)
        self._emit(names.BARRIER_FAILED, error_type=kind, error=message)
        self._end("failed", {error_attributes.ERROR_TYPE: kind}, message)

    def interrupted(self) -> None:
        """End a call that an interrupt ended, such as KeyboardInterrupt."""
        self._end("failed", {})

    def timed_out(
        self, report: MissingReport, timeout: float, *, own_names: bool
    ) -> BarrierTimeout:
        """Emit `barrier.timeout`, end the call and return the exception to raise.

        Args:
            report: Who is missing.
            timeout: The barrier's timeout in seconds.
            own_names: The caller's own decoder named the ranks.
        """
        guarded(self.span.begin, report.traceparent)
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
        if self.span.enabled:
            guarded(self._telemetry.flush, _FLUSH_TIMEOUT)
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
        text = torch_message(self._prefix, self._rank, self._world_size, shown, timeout)
        return BarrierTimeout(
            f"{text}: {report.describe()}",
            key_prefix=self._prefix,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
            waited=self._waited(),
            arrived_ranks=report.arrived_ranks,
            missing_ranks=report.missing_ranks,
            missing_names=report.missing_names,
            missing_causes=report.missing_causes,
            missing_doing=report.missing_doing,
            possibly_missing_ranks=report.possibly_missing_ranks,
            unidentified_count=report.unidentified_count,
            duplicate_ranks=report.duplicate_ranks,
        )

    def _end(
        self, result: Result, attributes: Mapping[str, Any], error: str | None = None
    ) -> None:
        duration = RECORDER.ticks() - self._started
        RECORDER.barriers.end(self._call, self._family, result, duration)
        arrival = {
            names.BARRIER_ARRIVAL_ORDER: self._order,
            names.BARRIER_ARRIVAL: self._arrival,
        }
        guarded(
            self.span.end,
            duration,
            {
                names.BARRIER_RESULT: result,
                **(arrival if self._order else {}),
                **attributes,
            },
            error,
        )

    def _waited(self) -> float:
        return (RECORDER.ticks() - self._started) / 1e9

    def _emit(self, event: str, **fields: Any) -> None:
        guarded(
            self._telemetry.emit,
            event,
            # In reading order: which barrier, who is missing, how long, the rest.
            barrier=self._shown,
            **fields,
            waited_seconds=round(self._waited(), 6),
            **({} if self._rank is None else {"rank": self._rank}),
            world_size=self._world_size,
            barrier_family=self._family,
            **self.span.ids(),
        )
