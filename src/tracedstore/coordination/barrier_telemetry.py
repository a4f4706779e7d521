"""What is told of one rank's visit of a barrier: gauges, span, events, exception."""

import time
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
from tracedstore.core.barrier_stats import Result, Stalled
from tracedstore.core.errors import TIMEOUT, error_message, error_type
from tracedstore.core.keys import printable
from tracedstore.core.recorder import RECORDER

# Seconds that the exporter of spans gets before the job learns of a timeout, and may
# end by it.
_FLUSH_WITHIN = 1.0
# Ranks that a span lists; backends cut long lists, or the whole span.
_MOST_LISTED = 64
# Does something that the barrier can do without; None where that fails.
guarded = partial(RECORDER.failures.guarded, names.BARRIERS)


class BarrierTelemetry:
    """Tells of one visit; what fails here is counted, and does not fail the barrier.

    Attributes:
        span: The visit's span.
    """

    def __init__(self, prefix: str, rank: int | None, world_size: int) -> None:
        self._prefix = prefix
        self._shown = printable(prefix)
        self._rank = rank
        self._world_size = world_size
        self._started = time.perf_counter_ns()
        self._place = 0
        self._arrival = 0.0
        self._family = RECORDER.families.of(self._shown)
        self._token = RECORDER.barriers.token()
        self.span = BarrierSpan(
            self._family,
            {
                names.BARRIER_PREFIX: self._shown,
                names.WORLD_SIZE: world_size,
                **({} if rank is None else {names.RANK: rank}),
            },
        )

    def arrived(self, place: int) -> None:
        """Note that the store has counted this rank."""
        self._place = place
        self._arrival = self._waited()

    def record_last_arrival(self) -> None:
        """Count that the others waited for this rank."""
        RECORDER.barriers.record_last_arrival(self._family)

    def stale(self, arrived: int, duplicates: Sequence[int]) -> None:
        """Tell that the prefix was used before."""
        self._emit(
            names.BARRIER_STALE_KEY,
            arrived_count=arrived,
            duplicate_ranks=list(duplicates),
        )

    def waiting(self, finding: MissingReport) -> None:
        """Tell who is missing, while this rank waits."""
        RECORDER.barriers.stalled(
            self._token,
            Stalled(
                family=self._family,
                arrived=finding.arrived_count,
                missing=dict(
                    zip(finding.missing_ranks, finding.missing_names, strict=True)
                ),
                possible=finding.missing_count if finding.possibly_missing_ranks else 0,
            ),
        )
        self.span.begin(finding.traceparent)
        self._emit(names.BARRIER_WAITING, **finding.event_fields())

    def completed(self, last: LastArrival) -> None:
        """Tell that everybody came."""
        if self.span.wanted:
            guarded(self.span.begin, last.traceparent)
            guarded(self.span.join, last.traceparent)
        self._end(
            "completed",
            {} if last.rank is None else {names.BARRIER_LAST_RANK: last.rank},
        )
        if RECORDER.detailed():
            self._emit(
                names.BARRIER_COMPLETED, last_rank=last.rank, arrival_order=self._place
            )

    def failed(self, error: Exception) -> None:
        """Tell that the store failed, whose error goes to the caller as it is."""
        kind, message = error_type(error), error_message(error)
        guarded(self.span.begin)
        self._emit(names.BARRIER_FAILED, error_type=kind, error=message)
        self._end("failed", {error_attributes.ERROR_TYPE: kind}, message)

    def timed_out(
        self, finding: MissingReport, timeout: float, *, own_names: bool
    ) -> BarrierTimeout:
        """Tell who is missing, at the end, and give what to raise.

        Args:
            finding: Who is.
            timeout: After how long, in seconds.
            own_names: They were named by the caller's own decoder.
        """
        guarded(self.span.begin, finding.traceparent)
        self._emit(
            names.BARRIER_TIMEOUT, **finding.event_fields(), timeout_seconds=timeout
        )
        error = self._exception(finding, timeout, own_names=own_names)
        self._end(
            "timeout",
            {
                error_attributes.ERROR_TYPE: TIMEOUT,
                names.BARRIER_ARRIVED_COUNT: finding.arrived_count,
                names.BARRIER_MISSING_COUNT: finding.missing_count,
                names.BARRIER_MISSING_RANKS: finding.missing_ranks[:_MOST_LISTED],
                names.BARRIER_MISSING_TEXT: finding.describe(),
            },
            error_message(error),
        )
        if self.span.wanted:
            guarded(RECORDER.flush, _FLUSH_WITHIN)
        return error

    def _exception(
        self, finding: MissingReport, timeout: float, *, own_names: bool
    ) -> BarrierTimeout:
        shown: Sequence[str] = finding.missing_names
        if not own_names:
            # torch's own decoder, where none is given, is str().
            shown = [
                str(rank)
                if name == decoders.default_name(rank)
                else f"{rank} on {name}"
                for rank, name in zip(finding.missing_ranks, shown, strict=True)
            ]
        words = torch_message(
            self._prefix, self._rank, self._world_size, shown, timeout
        )
        return BarrierTimeout(
            f"{words}: {finding.describe()}",
            key_prefix=self._prefix,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
            waited=self._waited(),
            arrived_ranks=finding.arrived_ranks,
            missing_ranks=finding.missing_ranks,
            missing_names=finding.missing_names,
            possibly_missing_ranks=finding.possibly_missing_ranks,
            unidentified_count=finding.unidentified_count,
            duplicate_ranks=finding.duplicate_ranks,
        )

    def _end(
        self, result: Result, attributes: Mapping[str, Any], error: str | None = None
    ) -> None:
        duration = time.perf_counter_ns() - self._started
        RECORDER.barriers.released(self._token)
        RECORDER.barriers.ended(self._family, result, duration)
        arrival = {
            names.BARRIER_ARRIVAL_ORDER: self._place,
            names.BARRIER_ARRIVAL: self._arrival,
        }
        guarded(
            self.span.end,
            duration,
            {
                names.BARRIER_RESULT: result,
                **(arrival if self._place else {}),
                **attributes,
            },
            error,
        )

    def _waited(self) -> float:
        return (time.perf_counter_ns() - self._started) / 1e9

    def _emit(self, event: str, **facts: Any) -> None:
        guarded(
            RECORDER.emit,
            event,
            # As somebody reads it: where, who, how long, and then the rest.
            barrier=self._shown,
            **facts,
            waited_seconds=round(self._waited(), 6),
            **({} if self._rank is None else {"rank": self._rank}),
            world_size=self._world_size,
            barrier_family=self._family,
            **self.span.ids(),
        )
