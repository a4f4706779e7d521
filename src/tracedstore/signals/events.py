"""Structured events, as structlog writes them.

An application that configured structlog gets the events through its configuration.
Without one, events go to standard error: standard output is the job's.

structlog is imported only to write for a terminal. It imports rich, Pygments and attrs
where they are installed, which takes 0.1 s of processor time in every worker, and a
worker that writes events at all writes JSON mostly. So lines of JSON are made here. The
import is not put off to the first event: a signal handler that forks meanwhile would
leave the child a lock of the import that nobody releases.

An event is rendered in the thread that emits it, with its context variables, and
written by the event writer: a log that blocks must not block the job. The processors of
an application's own configuration run in the writer, in a copy of the caller's context.
"""

import contextvars
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

from opentelemetry import trace

from tracedstore import names
from tracedstore.common.errors import error_location, error_message, error_type
from tracedstore.common.identity import ProcessIdentity
from tracedstore.recording.operation import Operation, Reason
from tracedstore.recording.queue_worker import Submit
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
# Seconds that such a call waits at most.
_WAIT_TIMEOUT = 0.2

# What makes two events repeats of each other.
Kind = tuple[str, ...]


# Makes what renders a line for a terminal: structlog's ConsoleRenderer.
Console = Callable[..., Callable[[Any, str, dict[str, Any]], str]]


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
        self._console: Console | None = None
        if log_format == "console" or (log_format == "auto" and _stderr_is_terminal()):
            from structlog.dev import ConsoleRenderer  # noqa: PLC0415 - see above

            self._console = ConsoleRenderer

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
            self._records.emit(level, event, fields, _json(_line(level, event, fields)))
        self._submit(
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
        if self._console is None or not (is_terminal or self._log_format == "console"):
            text = _json(line)
        else:
            renderer = self._console(colors=is_terminal, sort_keys=False)
            text = renderer(None, level, line)
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
