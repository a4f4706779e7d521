"""What a process pushes through OpenTelemetry: spans, metrics and log records.

Spans and log records go to the application's providers. Where it has none, and the
settings ask for it, they go to a collector by OTLP. Metrics go there only: the SDK has
no way to give a histogram that is counted already to a MeterProvider. The SDK is
imported only where it is used.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry._logs import LoggerProvider
from opentelemetry.trace import TracerProvider

from tracedstore import names
from tracedstore.common.threads import (
    DaemonThread,
    countdown,
    start_bounded_thread,
)
from tracedstore.export.settings import Settings
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.snapshot import Snapshots
from tracedstore.signals.events import LogRecords, application_provider

if TYPE_CHECKING:
    from tracedstore.export.otlp import PeriodicExport

# Apart from the writer of the log: a provider that blocks must not block that.
RECORD_WRITER: Final = QueueWorker(
    "tracedstore-otel_logs-writer", names.OTEL_LOGS, RECORDER.failures, stuck_after=10.0
)


# It is started early: CPython 3.12 starts no thread while the process ends, when the
# last spans, metrics and log records are exported.
SPARE_THREAD: Final = QueueWorker(
    "tracedstore-spare", names.OTEL_METRICS, RECORDER.failures, counts_drops=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """The providers given to `configure`, instead of OpenTelemetry's global ones."""

    tracer: TracerProvider | None = None
    logger: LoggerProvider | None = None


class Push:
    """Sends spans, metrics and log records, as configured.

    Args:
        settings: The settings.
        given: The providers given to `configure`.
        previous: What was configured before. Connections that are needed again stay.

    Attributes:
        own_tracer: The TracerProvider that was set up here, and is ended here.
        own_metrics: The same for metrics.
        own_logger: The same for log records.
        records: What events go to.

    Raises:
        ConfigurationError: An exporter is not installed, or cannot be configured.
    """

    def __init__(
        self, settings: Settings, given: Providers, previous: "Push | None"
    ) -> None:
        self._given = given
        self._pushes_events = settings.events_exporter != "log"
        # Any: the classes are the SDK's, which is not imported here.
        self.own_tracer: Any = previous.own_tracer if previous else None
        self.own_logger: Any = None
        self.own_metrics: "PeriodicExport | None" = None  # noqa: UP037
        # Whether `_logger_provider` may create one.
        self._owns_logger = False
        self.records = LogRecords(
            RECORD_WRITER, self._exports_events, self._logger_provider
        )
        if settings.disabled:
            return
        # The SDK is imported only where it is used.
        if settings.metrics_exporter == "otlp":
            from tracedstore.export.otlp import PeriodicExport  # noqa: PLC0415

            kept = previous.own_metrics if previous else None
            self.own_metrics = kept or PeriodicExport()
        self._owns_logger = (
            settings.events_exporter == "otlp"
            and given.logger is None
            and application_provider() is None
        )
        if self._owns_logger:
            self.own_logger = previous.own_logger if previous else None
            self._logger_provider()
        # Last, because it sets the global provider: nothing raises after it.
        if settings.tracing and given.tracer is None:
            from tracedstore.export.tracer_provider import set_up_provider  # noqa: PLC0415

            self.own_tracer = set_up_provider() or self.own_tracer

    def start(self, snapshots: Snapshots) -> None:
        """Begin to send metrics; a forked child, which has no thread, begins again."""
        if self.own_metrics is not None:
            self.own_metrics.start(snapshots)
        own = (self.own_tracer, self.own_metrics, self.own_logger)
        if own != (None, None, None):
            SPARE_THREAD.start()

    def flush_spans(self, timeout: float) -> None:
        """Export finished spans; return after the timeout at the latest."""
        export_with_timeout(timeout, {names.SPANS: lambda: self._flush_spans(timeout)})

    def end(self, timeout: float, *, own_only: bool) -> None:
        """Send what is left, and end what was set up here, within a timeout.

        Args:
            timeout: Seconds.
            own_only: Leave the application's providers alone, which it ends itself.
        """
        exports: dict[str, Callable[[], object]] = {}
        if self.own_tracer is not None or not own_only:
            exports[names.SPANS] = lambda: self._end_spans(timeout)
        if self.own_metrics is not None:
            exports[names.OTEL_METRICS] = self.own_metrics.end
        if RECORD_WRITER.is_running or self.own_logger is not None:
            exports[names.OTEL_LOGS] = lambda: self._end_records(
                timeout, own_only=own_only
            )
        export_with_timeout(timeout, exports)

    def end_unused(self, timeout: float, replacement: "Push") -> None:
        """End what was set up here and is not used by what replaces it."""
        exports: dict[str, Callable[[], object]] = {}
        if self.own_metrics not in (None, replacement.own_metrics):
            exports[names.OTEL_METRICS] = self.own_metrics.end
        if self.own_logger not in (None, replacement.own_logger):
            exports[names.OTEL_LOGS] = self.own_logger.shutdown
        export_with_timeout(timeout, exports)

    def reset(self) -> None:
        """Leave connections to the parent, as a forked child must."""
        RECORD_WRITER.reset()
        SPARE_THREAD.reset()
        self.own_logger = None
        if self.own_metrics is not None:
            self.own_metrics.reset()

    def _flush_spans(self, timeout: float) -> None:
        own_or_given = self.own_tracer or self._given.tracer
        _force_flush(own_or_given or trace.get_tracer_provider(), timeout)

    def _end_spans(self, timeout: float) -> None:
        self._flush_spans(timeout)
        if self.own_tracer is not None:
            self.own_tracer.shutdown()

    def _end_records(self, timeout: float, *, own_only: bool) -> None:
        RECORD_WRITER.stop(timeout)
        if self.own_logger is not None:
            self.own_logger.shutdown()
        elif not own_only:
            _force_flush(self._given.logger or application_provider(), timeout)

    def _exports_events(self) -> bool:
        if not self._pushes_events:
            return False
        is_ours = self._owns_logger or self._given.logger is not None
        return is_ours or application_provider() is not None

    def _logger_provider(self) -> LoggerProvider | None:
        if self._owns_logger and self.own_logger is None:
            from tracedstore.export.otlp import new_logger_provider  # noqa: PLC0415

            self.own_logger = new_logger_provider()
        return self.own_logger or self._given.logger or application_provider()


def _force_flush(provider: Any, timeout: float) -> None:
    # OpenTelemetry's API has no force_flush; the SDK's providers do.
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        force_flush(int(timeout * 1000))


def export_with_timeout(
    timeout: float, exports: Mapping[str, Callable[[], object]]
) -> None:
    """Run exports, each in a thread; return after the timeout whatever they do.

    If no thread can be started, the spare one runs them one after the other, unless it
    is still in an earlier one.

    Args:
        timeout: Seconds for all of them.
        exports: The exports, by the part of the telemetry that a failure is counted
            for.
    """
    left = countdown(timeout)
    threads: list[DaemonThread] = []
    unstarted: list[Callable[[], object]] = []
    for part, export in exports.items():
        guarded = partial(RECORDER.failures.guarded, part, export)
        try:
            threads.append(start_bounded_thread(guarded))
        except RuntimeError:
            unstarted.append(guarded)
    if unstarted and SPARE_THREAD.is_idle:
        SPARE_THREAD.submit(partial(_run_all, unstarted), wait=left())
    for thread in threads:
        thread.join(left())


def _run_all(exports: Iterable[Callable[[], object]]) -> None:
    for export in exports:
        export()


def exporter_name(signal: str) -> str:
    """Return the OTLP exporter that the environment chooses for a signal."""
    protocol = os.environ.get(
        f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    )
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
