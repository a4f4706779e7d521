"""The TracerProvider: one for jobs that have none, and late spans for any.

Only processes that have a TracerProvider import this module, because it imports the
tracing of OpenTelemetry's SDK.
"""

import itertools
import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any
from weakref import ref

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import ConfigurationError
from tracedstore.export.otel_export import exporter_name
from tracedstore.export.own_exporters import OwnExporter, own_resource
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import SharedParent

# Seconds for making late spans.
_TIMEOUT = 1.0
_EXPORTERS = "opentelemetry_traces_exporter"
_QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"
_DEFAULT_QUEUE_SIZE = 2048


def set_up_provider() -> TracerProvider | None:
    """Set the process's TracerProvider up from the ``OTEL_*`` variables.

    Returns:
        The provider, or None where the application has one, which stays.

    Raises:
        ConfigurationError: ``OTEL_TRACES_EXPORTER`` names an exporter that is not
            installed.
    """
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    processors = [
        _processor(name.strip())
        for name in chosen.split(",")
        if name.strip() not in ("", "none")
    ]
    # Not the SDK's exit hook, which waits for a collector that is down for as long as
    # the exporter retries: `export.setup` ends the provider within ``exit_timeout``.
    provider = TracerProvider(resource=own_resource(), shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


def _processor(name: str) -> SpanProcessor:
    if name == "console":
        return SimpleSpanProcessor(ConsoleSpanExporter())
    if name == "otlp":
        name = exporter_name("traces")
    for found in entry_points(group=_EXPORTERS, name=name):
        return OwnSpanProcessor(found.load()())
    raise ConfigurationError(
        f"OTEL_TRACES_EXPORTER asks for the span exporter {name!r}, which is not"
        " installed; install it (OTLP: pip install 'tracedstore[otlp]'), or set"
        " OTEL_TRACES_EXPORTER to console or none"
    )


class OwnSpanProcessor(BatchSpanProcessor):
    """Counts the spans that its queue had no room for.

    Nothing public tells that. What has come, less what exports have begun with, is in
    the queue; what is more than fits in there was dropped.
    """

    def __init__(self, exporter: Any) -> None:
        self._own = OwnExporter(names.SPANS, exporter)
        text = os.environ.get(_QUEUE_SIZE, "")
        self._room = int(text) if text.isdecimal() else _DEFAULT_QUEUE_SIZE
        self._numbers = itertools.count(1)
        self._dropped = 0
        super().__init__(self._own)  # type: ignore[arg-type]

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        super().on_end(span)
        found = span.get_span_context()
        if found is not None and found.trace_flags.sampled:
            dropped = next(self._numbers) - self._own.taken - self._room
            if dropped > self._dropped:
                more, self._dropped = dropped - self._dropped, dropped
                self._own.exports.drop(more)


class LateSpans(SpanProcessor):
    """A span processor that does nothing with spans, and makes late ones at a flush.

    The spans of completed barriers are made a moment after the call. An application
    that flushes its provider means them too. Nothing of its provider is replaced for
    that: a provider has a list of span processors, and this is one more.

    Args:
        flush: Makes the spans, within a number of seconds.
        provider: The provider that it is added to. Not kept alive.
    """

    def __init__(self, flush: Callable[[float], object], provider: Any) -> None:
        self._make = flush
        self._provider = ref(provider)
        self._flushes = False

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Make the late spans, and flush the provider again if it was flushed before.

        A provider flushes its processors in the order in which they were added. The
        application's come first, mostly, and have got the late spans only now.
        """
        provider = self._provider()
        if self._flushes or provider is None:
            return True
        RECORDER.failures.guarded(names.SPANS, self._make, _TIMEOUT)
        self._flushes = True
        try:
            return bool(provider.force_flush(timeout_millis))
        finally:
            self._flushes = False

    def shutdown(self) -> None:
        """Make the late spans, for processors that are shut down after this one."""
        RECORDER.failures.guarded(names.SPANS, self._make, _TIMEOUT)


class _GivenIds(RandomIdGenerator):
    """Has the ids that this thread asks for."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def generate_trace_id(self) -> int:
        return int(self.of_thread.shared.trace_id)

    def generate_span_id(self) -> int:
        return int(self.of_thread.shared.span_id)


def tracer_with_ids(provider: Any) -> Callable[[SharedParent], trace.Tracer | None]:
    """Return what returns a tracer whose next span, in this thread, has given ids.

    A provider has one generator of ids, which is the application's and stays. So this
    is another provider with the same sampler, resource and processors, which exports
    through them. It is made once, since the SDK keeps something of each.
    """
    # The one part that is not public; without it there is no shared parent to see.
    processors = getattr(provider, "_active_span_processor", None)
    if processors is None:
        return lambda _shared: None
    ids = _GivenIds()
    tracer = TracerProvider(
        sampler=provider.sampler,
        resource=provider.resource,
        shutdown_on_exit=False,
        active_span_processor=processors,
        id_generator=ids,
    ).get_tracer(names.SCOPE, __version__, schema_url=names.SCHEMA_URL)

    def with_ids(shared: SharedParent) -> trace.Tracer:
        ids.of_thread.shared = shared
        return tracer

    return with_ids
