"""Spans by OpenTelemetry's database conventions, created after the call.

A leaf call needs no current span while it runs, so the fast path pays nothing: the
span is created when the call has ended, with its start and end times.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
from opentelemetry.semconv.attributes import db_attributes as db
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import AttributeValue

from tracedstore import names, otel_names
from tracedstore._version import __version__
from tracedstore.common.identity import ProcessIdentity, StoreIdentity
from tracedstore.common.keys import OTHER_FAMILIES
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.recording.operation import EtcdRequest, Operation, Reason
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import SpanIds

# Pause before the next check for a tracer provider. A job usually sets one up right
# after its start; without one, calls must not pay for spans.
_PROVIDER_CHECK_NS = 50_000_000
_MAX_PREPARED = 16
# What a sampler gets as the name of a span whose ids are reserved.
RESERVED_NAME = "barrier"
_SPAN_REASONS = Reason.SAMPLED | Reason.SLOW | Reason.FAILED | Reason.RETRIED


class ReservedIds:
    """An id generator of the SDK that returns reserved ids where they are used.

    The last rank to arrive at a barrier gives the ids of its span to the others before
    it releases them. The SDK takes longer to start a span than a barrier takes. So the
    ids are taken first, and the span that gets them is started a moment later.

    Args:
        tracer: A tracer of the SDK. It gets its ids from here from now on.

    Attributes:
        prepared: For the next spans without a parent. Popping is atomic.
    """

    def __init__(self, tracer: Any) -> None:
        self._sampler = tracer.sampler
        self._generator = tracer.id_generator
        self._used = threading.local()
        self.prepared: list[SpanIds] = []
        tracer.id_generator = self

    @classmethod
    def of(cls, tracer: Tracer) -> "ReservedIds | None":
        """Reserve ids of a tracer; None if it is not one of the SDK."""
        is_sdk = hasattr(tracer, "id_generator") and hasattr(tracer, "sampler")
        return cls(tracer) if is_sdk else None

    def prepare(self, name: str) -> None:
        """Reserve ids for spans to come that are in no other trace.

        Two at a time, so that there are some after many barriers in a row.
        """
        for _ in range(min(2, _MAX_PREPARED - len(self.prepared))):
            self.prepared.append(self.reserve(name, context.Context()))

    def reset(self) -> None:
        """Forget prepared ids, as a forked child must: the parent has them too."""
        self.prepared.clear()

    def reserve(self, name: str, current: context.Context) -> SpanIds:
        """Return ids for a span in a context.

        The sampler decides now. It is asked again when the span is started.
        """
        parent = trace.get_current_span(current).get_span_context()
        if parent.is_valid:
            trace_id, flags = parent.trace_id, int(parent.trace_flags)
        else:
            trace_id = self._generator.generate_trace_id()
            # Not every version of the SDK knows whether an id is random.
            is_random = getattr(self._generator, "is_trace_id_random", bool)
            flags = 2 * is_random()
        flags &= ~TraceFlags.SAMPLED
        if self._sampler.should_sample(current, trace_id, name).decision.is_sampled():
            flags |= TraceFlags.SAMPLED
        return SpanIds.of(trace_id, self._generator.generate_span_id(), flags)

    @contextmanager
    def used(self, ids: SpanIds) -> Iterator[None]:
        """Return these ids in this thread."""
        self._used.ids = ids
        try:
            yield
        finally:
            self._used.ids = None

    # What the SDK calls.

    def generate_trace_id(self) -> int:
        """Return the id of a new trace."""
        ids: SpanIds | None = getattr(self._used, "ids", None)
        new: int = ids.trace_id if ids else self._generator.generate_trace_id()
        return new

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        ids: SpanIds | None = getattr(self._used, "ids", None)
        new: int = ids.span_id if ids else self._generator.generate_span_id()
        return new

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


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
        on_provider: Callable[[TracerProvider], None] = lambda _provider: None,
    ) -> None:
        self._recorder = recorder
        self._given = provider
        self._count_suppressed = count_suppressed
        # Gets each provider before its first span.
        self._on_provider = on_provider
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self._ids: ReservedIds | None = None
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

    def take_ids(self) -> SpanIds | None:
        """Return ids that were prepared for a span without a parent.

        Every barrier asks, before it begins: only an empty context is certain to have
        neither a parent nor what suppresses the span.
        """
        if self._ids is None or not self._ids.prepared or context.get_current():
            return None
        try:
            return self._ids.prepared.pop()
        except IndexError as error:
            if raised_by_handler(error):
                raise
            return None  # another thread was quicker

    def reserve(self) -> SpanIds | None:
        """Return the ids of a span that `start` starts later, in this context.

        None if the tracer is not one of the SDK, or there is to be no span.
        """
        current = context.get_current()
        if self._ids is None or current.get(_SUPPRESS_INSTRUMENTATION_KEY):
            return None
        return self._ids.reserve(RESERVED_NAME, current)

    def start(
        self,
        name: str,
        *,
        attributes: Mapping[str, AttributeValue],
        started_ns: int,
        parent: context.Context | None,
        links: Sequence[trace.Link] = (),
        ids: SpanIds | None = None,
    ) -> trace.Span | None:
        """Start a span that covers many calls, with reserved ids if there are some.

        None without a tracer provider, and if the caller suppresses instrumentation.
        """
        tracer = self._current_tracer()
        if tracer is None or context.get_value(_SUPPRESS_INSTRUMENTATION_KEY, parent):
            return None
        with nullcontext() if ids is None or not self._ids else self._ids.used(ids):
            span = tracer.start_span(
                name,
                context=parent,
                attributes=self._process | dict(attributes),
                start_time=started_ns,
                links=links,
            )
        if self._ids is not None:
            # Here, because no caller waits for it.
            self._ids.prepare(RESERVED_NAME)
        return span

    def reset(self) -> None:
        """Forget what is the parent's, as a forked child must."""
        self.suppressed_by_caller = 0
        if self._ids is not None:
            self._ids.reset()

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
        self._recorder.failures.guarded(self.name, self._on_provider, provider)
        self._provider = provider
        self._tracer = provider.get_tracer(
            names.SCOPE, __version__, schema_url=otel_names.SCHEMA_URL
        )
        self._ids = ReservedIds.of(self._tracer)

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
