"""Pushes metrics and log records to an OpenTelemetry collector.

Log records only of jobs without a LoggerProvider of their own. The OTLP exporters of
the SDK read the ``OTEL_*`` variables. Nothing is set globally: what the application
does with OpenTelemetry is not affected.
"""

import math
import os
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from opentelemetry import context
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource

from tracedstore import names
from tracedstore.common.errors import ConfigurationError, TracedStoreError
from tracedstore.common.identity import process_identity
from tracedstore.common.threads import DaemonThread
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.snapshot import MetricSource
from tracedstore.signals.otel_metrics import MetricStream, Temporality, in_scope
from tracedstore.signals.spans import process_attributes

_DEFAULT_INTERVAL_MS = 60_000
_DEFAULT_TIMEOUT_MS = 30_000
_TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_DELTA = AggregationTemporality.DELTA
# By OpenTelemetry's specification. `lowmemory` leaves counters that are read when they
# are collected cumulative.
_TEMPORALITIES: Final = {
    "cumulative": Temporality(),
    "delta": Temporality(counters=_DELTA, histograms=_DELTA),
    "lowmemory": Temporality(histograms=_DELTA),
}

# What the collector was given: it stays after a `shutdown`, as the counts do.
_streams: dict[Temporality, MetricStream] = {}


def exporter_name(signal: str) -> str:
    """Return the OTLP exporter that the environment chooses for a signal."""
    protocol = os.environ.get(
        f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    )
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def _new_exporter(signal: str, setting: str) -> Any:
    name = exporter_name(signal)
    for found in entry_points(group=f"opentelemetry_{signal}_exporter", name=name):
        return found.load()()
    raise ConfigurationError(
        f"{setting} is 'otlp', and the exporter {name!r} is not installed; install it"
        " (http/protobuf: pip install 'tracedstore[otlp]', grpc: pip install"
        " opentelemetry-exporter-otlp-proto-grpc), or choose another value"
    )


class PeriodicExport:
    """Exports the metrics of this process in an interval, from a thread of its own.

    Unlike the SDK's reader, a forked child gets a connection of its own, and what
    could not be delivered as a delta is in the next one.

    Raises:
        ConfigurationError: There is no exporter, or a variable has an unusable value.
    """

    def __init__(self) -> None:
        self._interval = _milliseconds(
            "OTEL_METRIC_EXPORT_INTERVAL", _DEFAULT_INTERVAL_MS
        )
        self._timeout = _milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", _DEFAULT_TIMEOUT_MS)
        temporality = _temporality()
        self._stream = _streams.setdefault(temporality, MetricStream(temporality))
        self._connection: _Connection | None = _Connection()
        self._source: MetricSource | None = None
        self._thread: DaemonThread | None = None
        self._ended = threading.Event()

    def start(self, source: MetricSource) -> None:
        """Export from now on; a second call only replaces the source."""
        self._source = source
        if self._thread is not None:
            return
        thread = DaemonThread(self._run, name="tracedstore-otlp")
        thread.start()
        self._thread = thread

    def flush(self) -> None:
        """Export now; returns when the collector has responded, or the timeout ends.

        Raises:
            TracedStoreError: The metrics could not be delivered.
        """
        with self._stream.lock:
            if self._source is None:
                return
            self._connection = self._connection or _Connection()
            read = self._stream.read(self._source)
            result = self._connection.export(read, self._timeout)
            if result is not MetricExportResult.SUCCESS:
                raise TracedStoreError(
                    "the OTLP exporter could not deliver metrics; the log of"
                    " opentelemetry has the reason; check OTEL_EXPORTER_OTLP_ENDPOINT"
                )
            self._stream.commit()

    def end(self) -> None:
        """Export once more, and no more then; see `flush`."""
        self._ended.set()
        try:
            self.flush()
        finally:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.exporter.shutdown()

    def reset(self) -> None:
        """Leave the connection to the parent, as a forked child must.

        The child's first Store call starts the exports again.
        """
        self._stream.reset()
        self._connection = self._thread = None
        self._ended = threading.Event()

    def _run(self) -> None:
        RECORDER.failures.guarded(names.OTEL_METRICS, self._connect)
        while not self._ended.wait(self._interval / 1000):
            RECORDER.failures.guarded(names.OTEL_METRICS, self.flush)

    def _connect(self) -> None:
        """Connect a forked child. The SDK cannot do that while the process ends."""
        with self._stream.lock:
            if not self._ended.is_set():
                self._connection = self._connection or _Connection()


class _Connection:
    """An exporter, and the resource of this process."""

    def __init__(self) -> None:
        self.exporter: MetricExporter = _new_exporter(
            "metrics", "TRACEDSTORE_METRICS_EXPORTER"
        )
        self._resource = Resource.create()

    def export(
        self, metrics: Sequence[Metric], timeout_millis: float
    ) -> MetricExportResult:
        # The rank may have become known by now.
        attributes = process_attributes(process_identity())
        resource = self._resource.merge(Resource(attributes))
        data = MetricsData([in_scope(resource, metrics)])
        # Instrumentations of HTTP clients must not trace the exporter.
        token = context.attach(context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            return self.exporter.export(data, timeout_millis=timeout_millis)
        finally:
            context.detach(token)


def new_logger_provider() -> LoggerProvider:
    """Return a LoggerProvider that sends log records to a collector.

    Raises:
        ConfigurationError: There is no exporter.
    """
    exporter = _new_exporter("logs", "TRACEDSTORE_EVENTS_EXPORTER")
    resource = Resource.create(process_attributes(process_identity()))
    # `export.setup` ends it within ``exit_timeout``.
    provider = LoggerProvider(resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def _milliseconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        number = float(text or default)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigurationError(
            f"{variable} is {text!r}; accepted is a number of milliseconds above 0"
        )
    return number


def _temporality() -> Temporality:
    text = os.environ.get(_TEMPORALITY, "").strip()
    temporality = _TEMPORALITIES.get(text.lower() or "cumulative")
    if temporality is None:
        raise ConfigurationError(
            f"{_TEMPORALITY} is {text!r}; accepted is one of"
            f" {', '.join(_TEMPORALITIES)}"
        )
    return temporality
