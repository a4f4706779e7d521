"""Spans by OpenTelemetry's database conventions, created after the call.

A leaf call needs no current span while it runs, so the fast path pays nothing: the
span is created when the call has ended, with its start and end times.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial

from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
from opentelemetry.semconv.attributes import db_attributes as db
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import AttributeValue

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.identity import ProcessIdentity, StoreIdentity
from tracedstore.common.keys import OTHER_FAMILIES
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.recording.operation import EtcdRequest, Operation, Reason
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import SharedParent

# Pause before the next check for a tracer provider. A job usually sets one up right
# after its start; without one, calls must not pay for spans.
_PROVIDER_CHECK_NS = 50_000_000
_SPAN_REASONS = Reason.SAMPLED | Reason.SLOW | Reason.FAILED | Reason.RETRIED


class Spans:
    """Creates a span for every call that is sampled, slow, failed or retried."""

    name = names.SPANS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        provider: TracerProvider | None = None,
        *,
        count_suppressed: bool = True,
        on_provider: Callable[
            [TracerProvider], Callable[[SharedParent], Tracer | None] | None
        ] = lambda _provider: None,
    ) -> None:
        self._recorder = recorder
        self._given = provider
        self._count_suppressed = count_suppressed
        # Gets each provider before its first span, and returns what returns a tracer
        # whose next span has given ids.
        self._on_provider = on_provider
        self._with_ids: Callable[[SharedParent], Tracer | None] | None = None
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self._provider_by_environment = OTEL_PYTHON_TRACER_PROVIDER in os.environ
        self._process = process_attributes(identity)
        self.suppressed_by_caller = 0

    def observe(self, operation: Operation) -> None:
        """Create the span of one call, if its reasons ask for one."""
        if not operation.reasons & _SPAN_REASONS:
            return
        tracer = self._current_tracer()
        if tracer is None or operation.thread_id in self._recorder.without_call_spans:
            return
        if context.get_value(_SUPPRESS_INSTRUMENTATION_KEY):
            self.suppressed_by_caller += 1
            return
        summary = _summary(operation)
        span = tracer.start_span(
            summary or f"{operation.method.name} {operation.store.server}".rstrip(),
            kind=SpanKind.INTERNAL if operation.store.in_process else SpanKind.CLIENT,
            attributes=self._attributes(operation, summary),
            start_time=operation.started_ns,
        )
        for request in operation.attempts.shown if operation.attempts else ():
            span.add_event(names.ETCD_REQUEST, _of_request(request), request.started_ns)
        if operation.explained:
            ended_ns = operation.started_ns + operation.duration_ns
            span.add_event(names.JOB_STALLED, operation.explained, ended_ns)
        if operation.error is not None:
            span.set_status(Status(StatusCode.ERROR, operation.error_message))
        span.end(operation.started_ns + operation.duration_ns)
        found = span.get_span_context()
        if found.is_valid and found.trace_flags.sampled:
            operation.trace_id = trace.format_trace_id(found.trace_id)
            operation.span_id = trace.format_span_id(found.span_id)

    def enabled(self) -> bool:
        """Return whether spans started now are recorded; every barrier asks."""
        if not self._recorder.on:
            return False
        if self._given is not None and self._given is self._provider:
            return True
        # Without a provider, `trace.get_tracer_provider` looks into the environment,
        # which takes ten times as long as the rest.
        if (
            self._given is None
            and getattr(trace, "_TRACER_PROVIDER", self) is None
            and not self._provider_by_environment
        ):
            return False
        return self._current_tracer() is not None

    def start(
        self,
        name: str,
        *,
        attributes: Mapping[str, AttributeValue],
        started_ns: int,
        parent: context.Context | None,
        shared: SharedParent | None = None,
    ) -> trace.Span | None:
        """Start a span that covers many calls.

        None without a tracer provider, and if the caller suppresses instrumentation.

        Args:
            name: Its name.
            attributes: Its attributes.
            started_ns: When it started, in nanoseconds since the epoch.
            parent: The context that it is started in.
            shared: The parent of the spans of all ranks. If the context has a span,
                there is another span as a child of that, so that both traces are whole.
        """
        tracer = self._current_tracer()
        if tracer is None or context.get_value(_SUPPRESS_INSTRUMENTATION_KEY, parent):
            return None
        start = partial(
            tracer.start_span,
            name,
            attributes=self._process | dict(attributes),
            start_time=started_ns,
        )
        if shared is None:
            return start(context=parent)
        remote = _remote(tracer, name, parent, shared)
        below = trace.set_span_in_context(trace.NonRecordingSpan(remote), parent)
        caller = trace.get_current_span(parent).get_span_context()
        if not caller.is_valid:
            return start(context=below)
        return _InTwoTraces(
            start(context=below, links=[trace.Link(caller)]),
            start(context=parent, links=[trace.Link(remote)]),
        )

    def add_shared(
        self,
        shared: SharedParent,
        name: str,
        *,
        attributes: Mapping[str, AttributeValue],
        started_ns: int,
        ended_ns: int,
        parent: context.Context | None,
    ) -> None:
        """Make the shared parent; its name is that of its children, as for the sampler.

        It has neither rank nor host: it is of all of them.
        """
        if self._current_tracer() is None or self._with_ids is None:
            return
        tracer = self._with_ids(shared)
        if tracer is None or context.get_value(_SUPPRESS_INSTRUMENTATION_KEY, parent):
            return
        run_id = self._process.get(names.RUN_ID)
        span = tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.INVALID_SPAN, parent),
            attributes={
                **({} if run_id is None else {names.RUN_ID: run_id}),
                **attributes,
            },
            start_time=started_ns,
        )
        if error_attributes.ERROR_TYPE in attributes:
            span.set_status(StatusCode.ERROR)
        span.end(ended_ns)

    def reset(self) -> None:
        """Forget what is the parent's, as a forked child must."""
        self.suppressed_by_caller = 0

    def set_identity(self, identity: ProcessIdentity) -> None:
        """Put another identity on the spans from now on."""
        self._process = process_attributes(identity)

    def _current_tracer(self) -> trace.Tracer | None:
        provider = self._given or trace.get_tracer_provider()
        budget = self._recorder.budget
        if provider is not self._provider:
            if isinstance(provider, trace.ProxyTracerProvider):
                budget.pause(until=self._recorder.ticks() + _PROVIDER_CHECK_NS)
                return None
            off_main_thread(self._use_provider, provider)
        budget.counting = self._count_suppressed
        return self._tracer

    def _use_provider(self, provider: TracerProvider) -> None:
        self._with_ids = self._recorder.failures.guarded(
            self.name, self._on_provider, provider
        )
        self._provider = provider
        self._tracer = provider.get_tracer(
            names.SCOPE, __version__, schema_url=names.SCHEMA_URL
        )

    def _attributes(
        self, operation: Operation, summary: str
    ) -> Mapping[str, AttributeValue]:
        store, method = operation.store, operation.method
        attributes: dict[str, AttributeValue] = {
            **self._process,
            db.DB_SYSTEM_NAME: store.system,
            db.DB_OPERATION_NAME: method.name,
            **_server(store),
        }
        if summary:
            attributes[db.DB_QUERY_SUMMARY] = summary
        if operation.error_type:
            attributes[error_attributes.ERROR_TYPE] = operation.error_type
        if method.keys == "one" and operation.keys:
            attributes[names.KEY] = operation.keys[0]
        elif method.keys == "many":
            attributes[names.KEYS] = operation.keys
            attributes[names.KEY_COUNT] = operation.key_count
        if method.size is not None and operation.error is None:
            attributes[names.VALUE_SIZE] = operation.value_bytes
        if operation.swapped is not None:
            attributes[names.CAS_SWAPPED] = operation.swapped
        if operation.attempts is not None:
            attributes[names.CAS_RETRY_COUNT] = operation.attempts.swaps_lost
            attributes[names.ETCD_REQUESTS] = operation.attempts.requests
            attributes[names.ETCD_WATCH_TIMEOUTS] = operation.attempts.watch_timeouts
            if operation.attempts.shown:
                attributes[names.ETCD_RECOVERIES] = operation.attempts.recoveries
        if operation.attributes is not None:
            attributes |= operation.attributes
        return attributes


class _InTwoTraces(trace.NonRecordingSpan):
    """The span of a barrier whose caller is in a trace of its own.

    Its ids are those in the trace of the barrier.
    """

    def __init__(self, *spans: trace.Span) -> None:
        super().__init__(spans[0].get_span_context())
        self._spans = spans

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Set them in both."""
        for span in self._spans:
            span.set_attributes(attributes)

    def set_status(
        self, status: Status | StatusCode, description: str | None = None
    ) -> None:
        """Set it in both."""
        for span in self._spans:
            span.set_status(status, description)

    def end(self, end_time: int | None = None) -> None:
        """End both."""
        for span in self._spans:
            span.end(end_time)


def _remote(
    tracer: Tracer, name: str, parent: context.Context | None, shared: SharedParent
) -> SpanContext:
    """Return the shared parent as a span of another process.

    Whether it is sampled is what the sampler says of a first span in its trace. It
    decides by the id of the trace, so all ranks get the same answer. For a span with a
    parent most samplers say what the parent's flag does: without this, all barriers
    would be sampled. A tracer that is not one of the SDK has no sampler to ask.
    """
    flags = TraceFlags.SAMPLED
    sampler = getattr(tracer, "sampler", None)
    if sampler is not None:
        alone = trace.set_span_in_context(trace.INVALID_SPAN, parent)
        result = sampler.should_sample(alone, shared.trace_id, name)
        flags = TraceFlags.SAMPLED if result.decision.is_sampled() else 0
    return SpanContext(*shared, is_remote=True, trace_flags=TraceFlags(flags))


def _of_request(request: EtcdRequest) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        db.DB_OPERATION_NAME: request.method,
        server_attributes.SERVER_ADDRESS: request.server,
        names.ETCD_REQUEST_SECONDS: request.duration_ns / 1e9,
    }
    if request.result != "ok":
        attributes[error_attributes.ERROR_TYPE] = request.result
    return attributes


def _summary(operation: Operation) -> str:
    # The key family is the query's template. Without one the span's name has the
    # server instead, by the conventions.
    if operation.family in ("", OTHER_FAMILIES):
        return ""
    return f"{operation.method.name} {operation.family}"


def _server(store: StoreIdentity) -> dict[str, AttributeValue]:
    server: dict[str, AttributeValue] = {}
    if store.address:
        server[server_attributes.SERVER_ADDRESS] = store.address
        if store.port is not None:
            server[server_attributes.SERVER_PORT] = store.port
    if store.namespace:
        server[db.DB_NAMESPACE] = store.namespace
    return server


def process_attributes(identity: ProcessIdentity) -> dict[str, AttributeValue]:
    """Return the identity of a process as attributes of spans and resources."""
    known = {
        names.RUN_ID: identity.run_id,
        names.RANK: identity.rank,
        names.LOCAL_RANK: identity.local_rank,
        names.WORLD_SIZE: identity.world_size,
        names.HOST_NAME: identity.host,
    }
    return {name: value for name, value in known.items() if value is not None}
