"""Structured events, through structlog.

An application that configured structlog gets the events through its configuration.
Without one, events go to standard error: standard output is the job's.

An event is rendered in the thread that emits it, with its context variables, and
written by the event writer: a log that blocks must not block the job. The processors of
an application's own configuration run in the writer, in a copy of the caller's context.
"""

import contextvars
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final, Protocol

import structlog
from opentelemetry import trace

from tracedstore import names
from tracedstore.common.errors import error_location, error_message, error_type
from tracedstore.common.identity import ProcessIdentity
from tracedstore.recording.operation import Operation, Reason
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import NULL_TELEMETRY

# An event of the same kind is emitted once in this time, with a count of the others.
_REPEAT_AFTER_NS = 10_000_000_000
# Kinds that are remembered for that. Families and error types are bounded, so only a
# job that fails everywhere reaches this.
_MAX_KINDS = 1024

LEVELS: Final = {
    names.OPERATION_SLOW: "warning",
    names.OPERATION_FAILED: "warning",
    names.OPERATION_STALLED: "warning",
    names.CAS_CONTENDED: "warning",
    names.BARRIER_WAITING: "warning",
    names.BARRIER_COMPLETED: "debug",
    names.BARRIER_TIMEOUT: "error",
    names.BARRIER_FAILED: "error",
    names.BARRIER_STALE_KEY: "warning",
    names.RENDEZVOUS_CONFLICT: "warning",
    names.RENDEZVOUS_WAITING: "warning",
    names.RENDEZVOUS_TIMEOUT: "error",
    names.RENDEZVOUS_FAILED: "error",
    names.JOB_STALLED: "warning",
    names.JOB_RESUMED: "info",
    names.STORE_STALE: "warning",
    names.TELEMETRY_DISABLED: "error",
    names.TELEMETRY_SERVING: "info",
}

# Levels of events that are written before the call that caused them returns.
_WRITTEN_AT_ONCE = frozenset({"warning", "error", "critical"})

# What makes two events repeats of each other.
Kind = tuple[str, ...]


class Submit(Protocol):
    """Queues a write; see `EventWriter.submit`."""

    def __call__(self, write: Callable[[], None], *, wait: bool) -> None:
        """Queue it."""


class Records(Protocol):
    """Emits events elsewhere as well; see `LogRecords`."""

    def enabled(self) -> bool:
        """Return whether it wants them now."""

    def emit(
        self, level: str, event: str, fields: Mapping[str, Any], line: str
    ) -> None:
        """Emit an event, given its fields and its line of JSON."""


class Events:
    """Emits events of notable calls, and limits repeats."""

    name = names.EVENTS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        submit: Submit,
        *,
        log_format: str = "auto",
        records: Records | None = None,
    ) -> None:
        self._records = records
        self._recorder = recorder
        self._submit = submit
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
        elif Reason.OVERDUE in operation.reasons:
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
        level = level or LEVELS[event]
        if self._log_format == "off" or self._recorder.failures.rests(self.name):
            return
        if level == "debug" and not self.emits_debug_events():
            return
        if "trace_id" not in fields:
            fields |= _current_trace()
        # The event's own fields first, then the identity of the process.
        fields = fields | self._identity.fields() | fields
        if self._records is not None and self._records.enabled():
            line = _render(level, event, fields, structlog.processors.JSONRenderer())
            self._records.emit(level, event, fields, line)
        self._submit(
            self._application_write(level, event, fields)
            if structlog.is_configured()
            else self._default_write(level, event, fields),
            wait=level in _WRITTEN_AT_ONCE,
        )

    # Whether events of debug level are written. They are where the application
    # configured structlog, which has the levels.
    emits_debug_events = staticmethod(structlog.is_configured)

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

    def _emit_operation(
        self,
        operation: Operation,
        event: str,
        *,
        level: str | None = None,
        **fields: Any,
    ) -> None:
        store = operation.store
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

    def _count_repeats(self, kind: Kind) -> int | None:
        """Return how many events of a kind were suppressed; None to suppress this."""
        now = self._recorder.ticks()
        with self._lock:
            last, suppressed = self._emitted.get(kind, (None, 0))
            if last is not None and now - last < _REPEAT_AFTER_NS:
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
        context = contextvars.copy_context()
        log = getattr(structlog.get_logger(names.SCOPE), level)
        return partial(context.run, log, event, **fields)

    def _default_write(
        self, level: str, event: str, fields: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Render an event; return a write of the line to standard error."""
        # Made anew each time: the application may replace sys.stderr.
        is_terminal = sys.stderr.isatty()
        as_text = self._log_format == "console" or (
            self._log_format == "auto" and is_terminal
        )
        renderer: structlog.typing.Processor = (
            structlog.dev.ConsoleRenderer(colors=is_terminal, sort_keys=False)
            if as_text
            else structlog.processors.JSONRenderer()
        )
        line = _render(level, event, fields, renderer)
        return partial(_write_line, f"{line}\n")


def _render(
    level: str,
    event: str,
    fields: Mapping[str, Any],
    renderer: structlog.typing.Processor,
) -> str:
    line: Any = {"event": event, **fields}
    for processor in (
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _timestamp_first,
        renderer,
    ):
        line = processor(None, level, line)
    return str(line)


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


def _timestamp_first(
    _logger: Any, _level: str, event: MutableMapping[str, Any]
) -> Mapping[str, Any]:
    return {key: event.pop(key) for key in ("timestamp", "level", "event")} | dict(
        event
    )


def _current_trace() -> dict[str, str]:
    current = trace.get_current_span().get_span_context()
    if not current.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(current.trace_id),
        "span_id": trace.format_span_id(current.span_id),
    }
