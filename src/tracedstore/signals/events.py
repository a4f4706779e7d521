"""Structured events, through structlog.

An application that configured structlog gets the events through its configuration.
Without one, events go to standard error: standard output is the job's.
"""

import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog
from opentelemetry import trace

from tracedstore import names
from tracedstore.core.errors import error_location, error_message, error_type
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.operation import Operation, Reason
from tracedstore.core.recorder import Recorder

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
    names.TELEMETRY_DISABLED: "error",
    names.TELEMETRY_SERVING: "info",
}

# What makes two events repeats of each other.
Kind = tuple[str, ...]


class Events:
    """Emits events of notable calls, and limits repeats."""

    name = names.EVENTS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        *,
        log_format: str = "auto",
    ) -> None:
        self._recorder = recorder
        self._identity = identity
        self._log_format = log_format
        # When a kind was last emitted, and how many were suppressed since.
        self._emitted: dict[Kind, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def observe(self, operation: Operation) -> None:
        """Emit the events that the reasons of a call ask for."""
        if operation.error is not None:
            self._emit_operation(
                operation,
                names.OPERATION_FAILED,
                error_type=operation.error_type,
                error=error_message(operation.error),
                **(operation.explained or {}),
            )
        elif Reason.OVERDUE in operation.reasons:
            self._emit_operation(
                operation, names.OPERATION_SLOW, in_flight=operation.in_flight
            )
        if Reason.CONTENDED in operation.reasons:
            losses = max(operation.retries, operation.losses_in_a_row)
            self._emit_operation(
                operation, operation.method.contended, losses_in_a_row=losses
            )

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. Exceptions of the logging configuration are the caller's."""
        if self._log_format == "off":
            return
        if LEVELS[event] == "debug" and not self.emits_debug_events():
            return
        if "trace_id" not in fields:
            fields |= _current_trace()
        # The event's own fields first, then the identity of the process.
        known = self._identity.fields()
        getattr(self._logger(), LEVELS[event])(event, **(fields | known | fields))

    @staticmethod
    def emits_debug_events() -> bool:
        """Return whether events of debug level are written.

        They are where the application configured structlog, which has the levels.
        """
        return structlog.is_configured()

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Emit `telemetry.disabled`."""
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
        self._lock = threading.Lock()
        self._emitted = {}

    def _emit_operation(self, operation: Operation, event: str, **fields: Any) -> None:
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

    def _logger(self) -> Any:
        # Made anew each time: the application may configure structlog later, and may
        # replace sys.stderr.
        if structlog.is_configured():
            return structlog.get_logger(names.SCOPE)
        as_text = self._log_format == "console" or (
            self._log_format == "auto" and sys.stderr.isatty()
        )
        renderer: structlog.typing.Processor = (
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False)
            if as_text
            else structlog.processors.JSONRenderer()
        )
        return structlog.wrap_logger(
            _StandardError(),
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _timestamp_first,
                renderer,
            ],
            wrapper_class=structlog.BoundLogger,
        )


class _StandardError:
    """Writes lines to the current standard error.

    structlog's WriteLogger holds a lock while it writes. A fork in another thread
    would copy that lock, locked, into the child.
    """

    def write(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = write


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
