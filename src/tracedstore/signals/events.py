"""Structured events: lines as structlog writes them, and OpenTelemetry log records.

An application that configured structlog gets the events through its configuration.
Without one, events go to standard error: standard output is the job's.

Lines are made here: JSON for a file or a collector, one sentence for a terminal
(`common.event_text`). structlog imports rich, Pygments and attrs where they are
installed, which takes 0.1 s of processor time in every worker, so it is used only where
the application has imported and configured it.

An event is rendered in the thread that emits it, with its context variables, and
written by the event writer: a log that blocks must not block the job. The processors of
an application's own configuration run in the writer, in a copy of the caller's context.

A log record has the line of the log as its body, so that queries for the log and
``tracedstore report`` read it too, and the fields of the event as attributes. It is
made in the thread that emits the event, and given to the LoggerProvider by a writer
thread of its own: a provider may export synchronously.
"""

import contextvars
import inspect
import json
import os
import select
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import Any, Final

from opentelemetry import trace
from opentelemetry._logs import LoggerProvider, SeverityNumber, get_logger_provider
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import (
    TracedStoreError,
    error_location,
    error_message,
    error_type,
)
from tracedstore.common.event_text import terminal_line
from tracedstore.common.identity import ProcessIdentity
from tracedstore.common.keys import OWN_KEYS
from tracedstore.recording.counters import BOUNDS, BUCKETS
from tracedstore.recording.operation import Operation, Reason
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import NULL_TELEMETRY

# An event of the same kind is emitted once in this time, with a count of the others.
_REPEAT_AFTER_NS = 10_000_000_000
# Slow calls of a store are.
_SLOW_REPEAT_AFTER_NS = 60_000_000_000
# A slow call is worth a line if it took so many nanoseconds, and so many times the
# median of this operation. A store in another region is slow in each call, and its
# histogram says so. A median of few calls says little: then it takes longer.
_SLOW_NS = 100_000_000
_SLOW_NS_WITHOUT_MEDIAN = 1_000_000_000
_SLOW_FACTOR = 50
_MIN_CALLS_OF_MEDIAN = 100
# Kinds that are remembered for that. Families and error types are bounded, so only a
# job that fails everywhere reaches this.
_MAX_KINDS = 1024


# Levels of events that are written before the call that caused them returns.
_WRITTEN_AT_ONCE = frozenset({"warning", "error", "critical"})
# Seconds that such a call waits at most.
_WAIT_TIMEOUT = 0.2

_SEVERITIES: Final = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
}
# Fields that a record has as such.
_OF_TRACE: Final = ("trace_id", "span_id")

# What makes two events repeats of each other.
Kind = tuple[str, ...]


class Events:
    """Emits events of notable calls, and limits repeats."""

    name = names.EVENTS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        writer: QueueWorker,
        *,
        log_format: str = "auto",
        records: "LogRecords | None" = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._records = records
        self._report = report
        self._recorder = recorder
        self._writer = writer
        self._identity = identity
        self._log_format = log_format
        # When a kind was last emitted, and how many were suppressed since.
        self._emitted: dict[Kind, tuple[int, int]] = {}
        self._lock = threading.RLock()

    def observe(self, operation: Operation) -> None:
        """Emit the events that the reasons of a call ask for."""
        if operation.error is not None:
            self._emit_operation(
                operation,
                names.OPERATION_FAILED,
                error_type=operation.error_type,
                error=operation.error_message,
                **(operation.explained or {}),
            )
        elif Reason.OVERDUE in operation.reasons and self._is_remarkable(operation):
            self._emit_operation(
                operation,
                names.OPERATION_SLOW,
                # `job.resumed` is one event for all ranks that waited for the same.
                level="debug" if operation.explained else None,
                in_flight=operation.in_flight,
                **(operation.explained or {}),
            )
        if Reason.CONTENDED in operation.reasons:
            losses = max(operation.retries, operation.losses_in_a_row)
            self._emit_operation(
                operation, operation.method.contended, losses_in_a_row=losses
            )

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Emit one event. After a write that failed, events rest for a minute."""
        level = level or names.EVENT_LEVELS[event]
        if self._log_format == "off" or self._recorder.failures.rests(self.name):
            return
        if level == "debug" and not self.emits_debug_events():
            return
        if "trace_id" not in fields:
            fields |= _current_trace()
        # The event's own fields first, then the identity of the process.
        fields = fields | self._identity.fields() | fields
        if self._records is not None and self._records.enabled():
            self._records.emit(level, event, fields, _json(_line(level, event, fields)))
        # One for each completed barrier would leave no room for the others.
        if self._report is not None and level != "debug":
            self._report(_json(_line(level, event, fields)))
        self._writer.submit(
            self._application_write(level, event, fields)
            if self.emits_debug_events()
            else self._default_write(level, event, fields),
            wait=_WAIT_TIMEOUT if level in _WRITTEN_AT_ONCE else 0.0,
        )

    @staticmethod
    def emits_debug_events() -> bool:
        """Return whether the application configured structlog, which has the levels."""
        # Another thread may be importing it: then it is not configured.
        is_configured = getattr(sys.modules.get("structlog"), "is_configured", None)
        return is_configured is not None and bool(is_configured())

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Emit `telemetry.disabled`; if events failed, log it."""
        if observer == self.name:
            NULL_TELEMETRY.report_failure(observer, error)
            return
        self.emit(
            names.TELEMETRY_DISABLED,
            observer=observer,
            error_type=error_type(error),
            error=error_message(error),
            error_location=error_location(error),
        )

    def set_identity(self, identity: ProcessIdentity) -> None:
        """Put another identity on the events from now on."""
        self._identity = identity

    def reset(self) -> None:
        """Forget suppressed events, and a lock that a fork may have copied locked."""
        self._lock = threading.RLock()
        self._emitted = {}

    def _is_remarkable(self, operation: Operation) -> bool:
        """Return whether an overdue call is slow for its store, and the job's own."""
        if any(OWN_KEYS in key for key in operation.keys):
            return False
        # With `slow_after=0` every call is reported: to see what a program calls.
        if operation.method.blocks or not self._recorder.slow_ns:
            return True
        duration = operation.duration_ns
        if duration < _SLOW_NS:
            return False
        median = self._median_of(operation)
        if median is None:
            return duration >= _SLOW_NS_WITHOUT_MEDIAN
        return duration >= _SLOW_FACTOR * median

    def _median_of(self, operation: Operation) -> int | None:
        """Return a bound of the median of an operation of this store; None of few."""
        total = [0] * (len(BOUNDS) + 1)
        for series, counts in self._recorder.counters.sums().items():
            labels = series.store, series.method, series.error_type
            if labels == (operation.store.kind, operation.method, ""):
                total = [a + b for a, b in zip(total, counts[BUCKETS:], strict=True)]
        if sum(total) < _MIN_CALLS_OF_MEDIAN:
            return None
        at = bisect_left(list(accumulate(total)), sum(total) / 2)
        return BOUNDS[at] if at < len(BOUNDS) else operation.duration_ns

    def _emit_operation(
        self,
        operation: Operation,
        event: str,
        *,
        level: str | None = None,
        **fields: Any,
    ) -> None:
        store = operation.store
        if event == names.OPERATION_SLOW and self._recorder.slow_ns:
            # One line for a store: whatever makes one call slow delays the others too.
            suppressed_count = self._count_repeats(
                (event, store.server), _SLOW_REPEAT_AFTER_NS
            )
        else:
            suppressed_count = self._count_repeats(
                (
                    event,
                    store.kind,
                    operation.method.name,
                    operation.family,
                    operation.error_type,
                )
            )
        if suppressed_count is None:
            return
        if operation.trace_id:
            fields["trace_id"] = operation.trace_id
            fields["span_id"] = operation.span_id
        self.emit(
            event,
            level=level,
            operation=operation.method.name,
            store=store.kind,
            server=store.server,
            key=operation.keys[0] if operation.keys else "",
            key_count=operation.key_count,
            key_family=operation.family,
            duration_seconds=round(operation.seconds, 6),
            suppressed_count=suppressed_count,
            **fields,
        )

    def _count_repeats(self, kind: Kind, after: int = _REPEAT_AFTER_NS) -> int | None:
        """Return how many events of a kind were suppressed; None to suppress this."""
        now = self._recorder.ticks()
        with self._lock:
            last, suppressed = self._emitted.get(kind, (None, 0))
            if last is not None and now - last < after:
                self._emitted[kind] = (last, suppressed + 1)
                return None
            if len(self._emitted) >= _MAX_KINDS:
                self._emitted.clear()
            self._emitted[kind] = (now, 0)
            return suppressed

    @staticmethod
    def _application_write(
        level: str, event: str, fields: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Return a write that runs the application's structlog configuration."""
        import structlog  # noqa: PLC0415 - the application has imported it

        context = contextvars.copy_context()
        log = getattr(structlog.get_logger(names.SCOPE), level)
        return partial(context.run, log, event, **fields)

    def _default_write(
        self, level: str, event: str, fields: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Render an event; return a write of the line to standard error."""
        line = _line(level, event, fields)
        # Asked each time: the application may replace sys.stderr.
        is_terminal = _stderr_is_terminal()
        if self._log_format == "console" or (
            self._log_format == "auto" and is_terminal
        ):
            text = terminal_line(line, colors=is_terminal)
        else:
            text = _json(line)
        return partial(_write_line, f"{text}\n")


def _stderr_is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):
        return False  # there is none, it is closed, or it is an object without isatty


def _line(level: str, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line in their order, as structlog's processors would."""
    line: dict[str, Any] = {"event": event, **fields}
    # What the application bound to its context is in every line. It can have bound
    # something only if it has imported structlog.
    bound = sys.modules.get("structlog.contextvars")
    merge = getattr(bound, "merge_contextvars", None)
    if merge is not None:
        line = merge(None, level, line)
    line["level"] = level
    line["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {key: line.pop(key) for key in ("timestamp", "level", "event")} | line


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, default=_json_fallback)


def _json_fallback(value: Any) -> Any:
    """Return what structlog writes for a value that JSON has not."""
    convert = getattr(value, "__structlog__", None)
    return repr(value) if convert is None else convert()


def _write_line(line: str) -> None:
    """Write a line to the current standard error.

    Not through the interpreter's own stream object: a thread that is blocked in it at
    exit holds its lock, and Python aborts when it cannot flush it.
    """
    stream = sys.stderr
    if stream is not sys.__stderr__ or stream is None:
        stream.write(line)
        stream.flush()
        return
    remaining = line.encode("utf-8", "backslashreplace")
    while remaining:
        try:
            remaining = remaining[os.write(stream.fileno(), remaining) :]
        except BlockingIOError:
            # A job made it non-blocking, and its reader is slow. Only the writer waits.
            writable = select.poll()
            writable.register(stream.fileno(), select.POLLOUT)
            writable.poll()


def _current_trace() -> dict[str, str]:
    current = trace.get_current_span().get_span_context()
    if not current.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(current.trace_id),
        "span_id": trace.format_span_id(current.span_id),
    }


def application_provider() -> LoggerProvider | None:
    """Return the LoggerProvider that the application has set."""
    provider = get_logger_provider()
    # The API has no public name for the provider that stands in for one.
    return None if "Proxy" in type(provider).__name__ else provider


class LogRecords:
    """Emits events as log records.

    Args:
        writer: Writes the records.
        enabled: Returns whether records are wanted now.
        provider: Returns the LoggerProvider. The writer calls it, for it may create
            one.
    """

    def __init__(
        self,
        writer: QueueWorker,
        enabled: Callable[[], bool],
        provider: Callable[[], LoggerProvider | None],
    ) -> None:
        self._writer = writer
        self.enabled = enabled
        self._provider = provider

    def emit(
        self, level: str, event: str, fields: Mapping[str, Any], line: str
    ) -> None:
        """Queue the record of an event."""
        record = {
            "timestamp": time.time_ns(),
            "context": _context(fields),
            "severity_number": _SEVERITIES[level],
            "severity_text": level.upper(),
            "body": line,
            "attributes": {
                name: _attribute(value)
                for name, value in fields.items()
                if value is not None and name not in _OF_TRACE
            },
            "event_name": event,
        }
        self._writer.submit(partial(self._write, record))

    def _write(self, record: dict[str, Any]) -> None:
        provider = self._provider()
        if provider is None:
            return
        logger = provider.get_logger(
            names.SCOPE, __version__, schema_url=names.SCHEMA_URL
        )
        if "event_name" not in inspect.signature(logger.emit).parameters:
            raise TracedStoreError(
                "events are not exported: the installed OpenTelemetry SDK has no events"
                " in its logs; install opentelemetry-sdk 1.39 or newer, or set"
                " TRACEDSTORE_EVENTS_EXPORTER to log"
            )
        logger.emit(**record)


def _context(fields: Mapping[str, Any]) -> Context:
    """Return a context with the span of an event, without one if it has none."""
    if not all(fields.get(name) for name in _OF_TRACE):
        return Context()
    span = SpanContext(
        trace_id=int(fields["trace_id"], 16),
        span_id=int(fields["span_id"], 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(NonRecordingSpan(span), Context())


def _attribute(value: Any) -> AttributeValue:
    """Return a field as an attribute: a list of mixed types becomes JSON."""
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Sequence):
        types = {type(one) for one in value}
        if len(types) <= 1 and types <= {str, bool, int, float}:
            return list(value)
    return json.dumps(value, default=str)
