"""Spans, made after the call and dated back, by OpenTelemetry's database conventions.

A leaf call needs no current span while it runs, so the fast path pays nothing: the
span is started with the call's start time and ended with its end.
"""

from collections.abc import Mapping, Sequence

from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.semconv.attributes import db_attributes as db
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.core.errors import error_message
from tracedstore.core.identity import ProcessIdentity, StoreIdentity
from tracedstore.core.keys import OTHER_FAMILIES
from tracedstore.core.operation import Operation
from tracedstore.core.recorder import Recorder

# The version of the conventions whose names are used; all of them are stable there.
_SCHEMA_URL = "https://opentelemetry.io/schemas/1.36.0"

# How soon to look again for a provider that was not there. A job usually sets one
# up right after it started; until then nothing should be spent on spans.
_LOOK_AGAIN_AFTER_NS = 50_000_000


class Spans:
    """Gives a span to every call that is notable or that the budget lets through."""

    name = names.SPANS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        provider: TracerProvider | None = None,
        *,
        count_the_rest: bool = True,
    ) -> None:
        self._recorder = recorder
        self._given = provider
        self._count_the_rest = count_the_rest
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self._process = process_attributes(identity)
        self.suppressed_by_caller = 0

    def observe(self, operation: Operation) -> None:
        """Make the span of one call, if it is to have one."""
        if not (
            operation.admitted
            or operation.slow
            or operation.error is not None
            or operation.retries
        ):
            return
        tracer = self._current_tracer()
        if tracer is None or context.get_value(names.TOLD_BY_BARRIER):
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
        if operation.error is not None:
            span.set_status(Status(StatusCode.ERROR, error_message(operation.error)))
        span.end(operation.started_ns + operation.duration_ns)
        found = span.get_span_context()
        if found.is_valid and found.trace_flags.sampled:
            operation.trace_id = trace.format_trace_id(found.trace_id)
            operation.span_id = trace.format_span_id(found.span_id)

    def wanted(self) -> bool:
        """Tell whether anybody takes spans now."""
        return self._current_tracer() is not None and not context.get_value(
            _SUPPRESS_INSTRUMENTATION_KEY
        )

    def start(
        self,
        name: str,
        *,
        attributes: Mapping[str, AttributeValue],
        started_ns: int,
        parent: context.Context | None,
        links: Sequence[trace.Link] = (),
    ) -> trace.Span | None:
        """Start the span of something that is made of many calls."""
        tracer = self._current_tracer()
        if tracer is None:
            return None
        return tracer.start_span(
            name,
            context=parent,
            attributes=self._process | dict(attributes),
            start_time=started_ns,
            links=links,
        )

    def set_identity(self, identity: ProcessIdentity) -> None:
        """Put another identity on the spans from here on."""
        self._process = process_attributes(identity)

    def _current_tracer(self) -> trace.Tracer | None:
        provider = self._given or trace.get_tracer_provider()
        budget = self._recorder.budget
        if isinstance(provider, trace.ProxyTracerProvider):
            budget.pause(until=self._recorder.ticks() + _LOOK_AGAIN_AFTER_NS)
            return None
        if provider is not self._provider:
            self._provider = provider
            self._tracer = provider.get_tracer(
                names.SCOPE, __version__, schema_url=_SCHEMA_URL
            )
        budget.counting = self._count_the_rest
        return self._tracer

    def _attributes(
        self, operation: Operation, summary: str
    ) -> Mapping[str, AttributeValue]:
        store, method = operation.store, operation.method
        attributes: dict[str, AttributeValue] = {
            **self._process,
            db.DB_SYSTEM_NAME: store.system,
            db.DB_OPERATION_NAME: method.name,
            **_where(store),
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
        if operation.attributes is not None:
            attributes |= operation.attributes
        return attributes


def _summary(operation: Operation) -> str:
    # The family is the template of the key. Without one the name falls back to the
    # server's, as the conventions have it.
    if operation.family in ("", OTHER_FAMILIES):
        return ""
    return f"{operation.method.name} {operation.family}"


def _where(store: StoreIdentity) -> dict[str, AttributeValue]:
    where: dict[str, AttributeValue] = {}
    if store.address:
        where[server_attributes.SERVER_ADDRESS] = store.address
        if store.port is not None:
            where[server_attributes.SERVER_PORT] = store.port
    if store.namespace:
        where[db.DB_NAMESPACE] = store.namespace
    return where


def process_attributes(identity: ProcessIdentity) -> dict[str, AttributeValue]:
    """Give what is known of the process as attributes, for spans and the resource."""
    known = {
        names.RUN_ID: identity.run_id,
        names.RANK: identity.rank,
        names.LOCAL_RANK: identity.local_rank,
        names.WORLD_SIZE: identity.world_size,
        names.HOST_NAME: identity.host,
    }
    return {name: value for name, value in known.items() if value is not None}
