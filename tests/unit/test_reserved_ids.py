"""Ids that are known before their span is started."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracer, Span

from tracedstore.common.identity import ProcessIdentity
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import NULL_TELEMETRY, SpanIds
from tracedstore.signals.spans import ReservedIds, Spans


@pytest.fixture
def spans(provider: TracerProvider) -> Spans:
    """Return spans that go to the test's provider."""
    return spans_of(provider)


def spans_of(provider: trace.TracerProvider) -> Spans:
    """Return spans that go to a provider."""
    spans = Spans(Recorder(NULL_TELEMETRY), ProcessIdentity(), provider)
    assert spans.enabled()
    return spans


def started(spans: Spans, ids: SpanIds | None) -> Span:
    """Start a span with these ids in the current context."""
    span = spans.start("barrier", attributes={}, started_ns=1, parent=None, ids=ids)
    assert span is not None
    return span


def ids_of(span: Span) -> SpanIds:
    """Return the ids of a span."""
    found = span.get_span_context()
    return SpanIds.of(found.trace_id, found.span_id, found.trace_flags)


def test_span_gets_reserved_ids(spans: Spans) -> None:
    """The next span of the tracer has ids of its own."""
    ids = spans.reserve()
    assert ids is not None

    assert ids_of(started(spans, ids)) == ids
    after = ids_of(started(spans, None))
    assert ids.trace_id != after.trace_id
    assert ids.span_id != after.span_id


def test_prepared(spans: Spans) -> None:
    """Spans prepare ids for the next ones, which a forked child does not use."""
    assert spans.take_ids() is None
    for _ in range(20):
        started(spans, None)
    taken = [spans.take_ids() for _ in range(16)]
    assert len(set(taken)) == 16
    assert None not in taken
    assert spans.take_ids() is None

    started(spans, None)
    spans.reset()
    assert spans.take_ids() is None


def test_prepared_and_in_a_trace(spans: Spans, provider: TracerProvider) -> None:
    """Prepared ids have a trace of their own, so a span with a parent has others."""
    started(spans, None)
    with provider.get_tracer("test").start_as_current_span("step"):
        assert spans.take_ids() is None
    suppressing = context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True)
    token = context.attach(suppressing)
    assert spans.take_ids() is None
    context.detach(token)
    assert spans.take_ids() is not None


def test_span_of_another_thread(spans: Spans, provider: TracerProvider) -> None:
    """Ids that a thread uses are not given to spans of other threads."""
    tracer = provider.get_tracer("test")
    generator = ReservedIds.of(tracer)
    ids = spans.reserve()
    assert generator is not None
    assert ids is not None

    with generator.used(ids), ThreadPoolExecutor(1) as pool:
        other = pool.submit(tracer.start_span, "other").result(10)
        own = tracer.start_span("own")

    assert ids_of(other).span_id != ids.span_id
    assert ids_of(own).span_id == ids.span_id


def test_in_the_trace_of_the_caller(spans: Spans, provider: TracerProvider) -> None:
    """A caller that is in a span has its trace."""
    with provider.get_tracer("test").start_as_current_span("step") as step:
        ids = spans.reserve()
        assert ids is not None
        span = started(spans, ids)

    assert ids_of(span) == ids
    assert ids.trace_id == step.get_span_context().trace_id


@pytest.mark.parametrize(
    "sampler", [ALWAYS_OFF, ParentBased(ALWAYS_OFF), TraceIdRatioBased(0)]
)
def test_sampler_decides(sampler: TraceIdRatioBased) -> None:
    """Ids of a span that is not sampled say so."""
    spans = spans_of(TracerProvider(sampler=sampler, shutdown_on_exit=False))
    ids = spans.reserve()
    assert ids is not None

    assert not int(ids.traceparent[-2:], 16) & trace.TraceFlags.SAMPLED
    assert ids_of(started(spans, ids)) == ids


def test_tracer_that_is_not_of_the_sdk() -> None:
    """It has no ids to reserve, and starts its spans as before."""
    assert ReservedIds.of(NoOpTracer()) is None
    spans = spans_of(trace.NoOpTracerProvider())

    assert spans.reserve() is None
    assert not started(spans, None).is_recording()


def test_suppressed(spans: Spans) -> None:
    """A caller that suppresses instrumentation gets neither ids nor a span."""
    token = context.attach(context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
    try:
        assert spans.reserve() is None
        assert spans.start("barrier", attributes={}, started_ns=1, parent=None) is None
    finally:
        context.detach(token)
