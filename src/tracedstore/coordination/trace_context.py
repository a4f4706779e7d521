"""One trace over all ranks of a barrier.

The first rank to arrive starts its span at once and publishes its traceparent in the
store. The last rank passes it on to all others in the key that completes the barrier.
Each rank's span is a child of the first rank's span; where the caller is in a trace
already, the span stays in that trace and links to the first rank's. All spans but the
first rank's are created at the end, with their start times, when their parent is known.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracedstore import names
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import Telemetry

_W3C = TraceContextTextMapPropagator()
_HEADER = "traceparent"


class BarrierSpan:
    """The span of one rank's barrier call, in the trace that all ranks share.

    Attributes:
        enabled: Spans are recorded; otherwise every method has no effect.
    """

    def __init__(
        self, telemetry: Telemetry, family: str, attributes: Mapping[str, Any]
    ) -> None:
        self._telemetry = telemetry
        self.enabled = telemetry.tracing_enabled()
        self._family = family
        self._attributes = attributes
        self._started = RECORDER.clock.wall()
        # The caller's context: a warning starts the span in the watcher's thread.
        self._caller = context.get_current() if self.enabled else None
        self._span: Span | None = None
        self._joined: SpanContext | None = None
        self._published = False
        self._lock = threading.Lock()

    def begin(self, shared: str = "") -> None:
        """Start the span, unless it is started.

        Args:
            shared: The traceparent that all ranks share, where it is known. Without
                one, the other ranks may join this span.
        """
        with self._lock:
            if self.enabled and self._span is None:
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
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(self._span, context.Context()))
        return headers.get(_HEADER, "")

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
    ) -> None:
        """End the span, this long after its start; with an error, if there is one."""
        if self._span is None:
            return
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._started + nanoseconds)

    @contextmanager
    def suppress_call_spans(self) -> Iterator[None]:
        """Create no spans for Store calls in this context: this span covers them.

        Theirs would be in other traces: their parent is not known yet.
        """
        if not self.enabled:
            yield
            return
        token = context.attach(context.set_value(names.SUPPRESS_CALL_SPANS, True))
        try:
            yield
        finally:
            context.detach(token)

    def _start(self, shared: SpanContext | None) -> None:
        self._joined = shared
        parent = self._caller
        links: tuple[Link, ...] = ()
        if shared is not None:
            if trace.get_current_span(parent).get_span_context().is_valid:
                links = (Link(shared),)
            else:
                parent = trace.set_span_in_context(
                    trace.NonRecordingSpan(shared), parent
                )
        self._span = self._telemetry.start_span(
            f"barrier {self._family}",
            attributes=self._attributes,
            started_ns=self._started,
            parent=parent,
            links=links,
        )


def _parsed(traceparent: str) -> SpanContext | None:
    extracted = _W3C.extract({_HEADER: traceparent}, context.Context())
    found = trace.get_current_span(extracted).get_span_context()
    return found if found.is_valid else None
