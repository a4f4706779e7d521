"""One trace over all ranks of a barrier.

The last rank to arrive gives the ids of its span to all others in the key that
completes the barrier. Each rank's span is a child of the last rank's span; where the
caller is in a trace already, the span stays in that trace and links to the last rank's.
If a barrier is late, the first rank that reports it has the span that the others join.
Spans are created when their parent is known, with their start times.
"""

import re
import threading
from collections.abc import Mapping
from contextvars import Context
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
)

from tracedstore import names
from tracedstore.common.keys import key_text
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import NULL_TELEMETRY, SpanIds, Telemetry

# W3C's format, in the one version that there is. OpenTelemetry's propagator does the
# same for the headers of requests, in ten times the time.
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class BarrierSpan:
    """The span of one rank's barrier call, in the trace that all ranks share.

    Args:
        telemetry: Starts the span.
        prefix: Prefix of the barrier's keys.
        rank: The rank of this process, where it is known.
        world_size: Number of ranks.
        began: When the call began, in ticks.
        caller: The context of the caller: most spans are started in another thread.
        ids: The ids that were reserved for it.
        enabled: Record spans.

    Attributes:
        enabled: Spans are recorded; otherwise every method has no effect.
    """

    __slots__ = (
        "_caller",
        "_ids",
        "_joined",
        "_lock",
        "_prefix",
        "_published",
        "_rank",
        "_span",
        "_started",
        "_telemetry",
        "_world_size",
        "enabled",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        prefix: str,
        rank: int | None,
        world_size: int,
        began: int,
        caller: Context,
        *,
        ids: SpanIds | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self._span: Span | None = None
        if not enabled:
            return
        self._telemetry = telemetry
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._started = RECORDER.clock.wall_of(began)
        self._caller = caller
        self._ids = ids
        self._joined: SpanContext | None = None
        self._published = False
        self._lock = threading.RLock()

    def begin(self, shared: str = "") -> None:
        """Start the span, unless it is started.

        Args:
            shared: The traceparent that all ranks share, where it is known. Without
                one, the other ranks may join this span.
        """
        if not self.enabled:
            return
        with self._lock:
            if self._span is None:
                self._start(_parsed(shared))

    def join(self, shared: str) -> None:
        """Move the span into the shared trace; link to it if events have its ids."""
        if self._span is None:
            return
        with self._lock:
            other = _parsed(shared)
            if other is None:
                return
            known = (self._joined, self._span.get_span_context())
            if other.span_id in {one.span_id for one in known if one is not None}:
                return
            if self._published:
                self._span.add_link(other)
            else:
                # Two ranks arrived at the same time, and the last one did not read the
                # first one's traceparent. A span that is not ended is not exported.
                self._start(other)

    def traceparent(self) -> str:
        """Return the traceparent that other ranks join, "" without a span."""
        if self._span is None:
            return ""
        own = self._span.get_span_context()
        if not own.is_valid:
            return ""
        return SpanIds.of(own.trace_id, own.span_id, own.trace_flags).traceparent

    def ids(self) -> dict[str, str]:
        """Return the trace and span ids for an event of this call."""
        found = None if self._span is None else self._span.get_span_context()
        if found is None or not (found.is_valid and found.trace_flags.sampled):
            return {}
        self._published = True
        return {
            "trace_id": trace.format_trace_id(found.trace_id),
            "span_id": trace.format_span_id(found.span_id),
        }

    def end(
        self,
        nanoseconds: int,
        attributes: Mapping[str, Any],
        error: str | None = None,
        *,
        shared: str | None = None,
    ) -> None:
        """End the span, this long after its start; with an error, if there is one.

        Args:
            nanoseconds: Its duration.
            attributes: Further attributes.
            error: The error that ended the call.
            shared: The traceparent that all ranks share. With one, even "", a span that
                is not started is started now, and one that is joins it.
        """
        if not self.enabled:
            return
        with self._lock:
            starts = self._span is None and shared is not None
            if starts:
                self._start(_parsed(shared or ""), attributes)
        if not starts:
            self.join(shared or "")
        if self._span is None:
            return
        if not starts:
            self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._started + nanoseconds)

    def _start(
        self, shared: SpanContext | None, more: Mapping[str, Any] | None = None
    ) -> None:
        if self._ids is not None and shared is not None:
            # Its own, as the last rank.
            shared = None if shared.span_id == self._ids.span_id else shared
        self._joined = shared
        parent = self._caller.run(context.get_current)
        links: tuple[Link, ...] = ()
        if shared is not None:
            if trace.get_current_span(parent).get_span_context().is_valid:
                links = (Link(shared),)
            else:
                parent = trace.set_span_in_context(
                    trace.NonRecordingSpan(shared), parent
                )
        shown = key_text(self._prefix)
        self._span = self._telemetry.start_span(
            f"barrier {RECORDER.cold.label_value('barrier', shown)}",
            attributes={
                names.BARRIER_PREFIX: shown,
                names.WORLD_SIZE: self._world_size,
                **({} if self._rank is None else {names.RANK: self._rank}),
                **(more or {}),
            },
            started_ns=self._started,
            parent=parent,
            links=links,
            ids=self._ids,
        )


def _parsed(traceparent: str) -> SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    found = SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags)
    )
    return found if found.is_valid else None


# For calls without a span.
NO_SPAN: Final = BarrierSpan(NULL_TELEMETRY, "", None, 0, 0, Context(), enabled=False)
