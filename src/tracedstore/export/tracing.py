"""Sets up an OpenTelemetry TracerProvider for jobs that have none."""

import os
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)
from opentelemetry.util.types import AttributeValue

from tracedstore.common.errors import ConfigurationError
from tracedstore.export.otlp import exporter_name

_EXPORTERS = "opentelemetry_traces_exporter"


def set_up_provider(attributes: dict[str, AttributeValue]) -> TracerProvider | None:
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
    provider = TracerProvider(
        resource=Resource.create(attributes), shutdown_on_exit=False
    )
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
        return BatchSpanProcessor(found.load()())
    raise ConfigurationError(
        f"OTEL_TRACES_EXPORTER asks for the span exporter {name!r}, which is not"
        " installed; install it (OTLP: pip install 'tracedstore[otlp]'), or set"
        " OTEL_TRACES_EXPORTER to console or none"
    )
