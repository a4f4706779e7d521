"""One trace over all ranks of a barrier.

The first to arrive starts its span at once and leaves its traceparent in the store;
the last one passes it on to everybody with the news that the barrier is complete. Each
rank's span is a child of the first one's, or, where its caller is in a trace of its
own, stays there with a link. All but the first one's are made at the end and dated
back, when it is known what they belong to.
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

_W3C = TraceContextTextMapPropagator()
_HEADER = "traceparent"


class BarrierSpan:
    """The span of one rank's visit of a barrier, in the trace that all share."""

    def __init__(self, family: str, attributes: Mapping[str, Any]) -> None:
        self.wanted = RECORDER.tracing()
        self._family = family
        self._attributes = attributes
        self._started = RECORDER.clock.wall()
        # The caller's, because a warning is told from another thread.
        self._caller = context.get_current() if self.wanted else None
        self._span: Span | None = None
        self._joined: SpanContext | None = None
        self._told = False
        self._lock = threading.Lock()

    def begin(self, shared: str = "") -> None:
        """Start it, unless it is started.

        Args:
            shared: The traceparent that all ranks share, where it is known; without
                one this span may become what they share.
        """
        with self._lock:
            if self.wanted and self._span is None:
                self._start(_parsed(shared))

    def join(self, shared: str) -> None:
        """Belong to the trace that all ranks share, late as it may be."""
        if self._span is None:
            return
        with self._lock:
            other = _parsed(shared)
            if other is None:
                return
            known = (self._joined, self._span.get_span_context())
            if other.span_id in {one.span_id for one in known if one is not None}:
                return
            if self._told:
                self._span.add_link(other)
            else:
                # Two came at the same time, and the last one did not see what the
                # first one left. A span that is never ended is never exported.
                self._start(other)

    def traceparent(self) -> str:
        """Give what the others join, "" where there is nothing to join."""
        if self._span is None:
            return ""
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(self._span, context.Context()))
        return headers.get(_HEADER, "")

    def ids(self) -> dict[str, str]:
        """Give the ids that an event about this visit carries."""
        found = None if self._span is None else self._span.get_span_context()
        if found is None or not (found.is_valid and found.trace_flags.sampled):
            return {}
        self._told = True
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
        """End it, so long after its start; with an error, if there was one."""
        if self._span is None:
            return
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._started + nanoseconds)

    @contextmanager
    def suppress_call_spans(self) -> Iterator[None]:
        """Give the Store calls made meanwhile no spans: this one stands for them.

        They would be in traces of their own: what they belong to is not known yet.
        """
        if not self.wanted:
            yield
            return
        token = context.attach(context.set_value(names.TOLD_BY_BARRIER, True))
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
        self._span = RECORDER.start_span(
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
