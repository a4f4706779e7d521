"""Structured events, one line for what deserves one, through structlog.

An application that configured structlog gets the events in its own way. One that did
not gets them on standard error: standard output belongs to the job.
"""

import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog
from opentelemetry import trace

from tracedstore import names
from tracedstore.core.errors import error_message, error_type
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.operation import Operation
from tracedstore.core.recorder import Recorder

# The same trouble at the same place is told once in this time, with a count.
_REPEAT_AFTER_NS = 10_000_000_000
# Places that are remembered for that; families and error types are bounded, so this
# is only reached by a job that is in trouble everywhere.
_MOST_PLACES = 1024

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

Place = tuple[str, ...]


class Events:
    """Tells of calls that were slow, failed, or kept losing; limits repeats."""

    name = names.EVENTS

    def __init__(
        self,
        recorder: Recorder,
        identity: ProcessIdentity,
        *,
        log_format: str = "auto",
        blocked_after: float = 30.0,
        contended_after: int = 5,
    ) -> None:
        self._recorder = recorder
        self._identity = identity
        self._log_format = log_format
        self._blocked_after_ns = blocked_after * 1e9
        self._contended_after = contended_after
        # Place -> when it was last told, and what was held back since.
        self._told: dict[Place, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def observe(self, operation: Operation) -> None:
        """Tell of one call, if it deserves a line."""
        if operation.error is not None:
            self._tell(
                operation,
                names.OPERATION_FAILED,
                error_type=operation.error_type,
                error=error_message(operation.error),
                **(operation.explained or {}),
            )
        elif operation.duration_ns >= self._blocked_after_ns or (
            # To wait is what a blocking call is for.
            operation.slow and not operation.method.blocks
        ):
            self._tell(operation, names.OPERATION_SLOW, in_flight=operation.in_flight)
        losses = max(operation.retries, operation.losses_in_a_row)
        lost = operation.swapped is False or operation.retries > 0
        if lost and losses >= self._contended_after:
            self._tell(operation, operation.method.contended, losses_in_a_row=losses)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event; what raises here is for the caller to handle."""
        if self._log_format == "off":
            return
        # An application that wants details configures its log.
        if LEVELS[event] == "debug" and not self.detailed():
            return
        if "trace_id" not in fields:
            fields |= _current_trace()
        # First what happened, then to whom.
        known = self._identity.fields()
        getattr(self._logger(), LEVELS[event])(event, **(fields | known | fields))

    @staticmethod
    def detailed() -> bool:
        """Tell whether events of debug level are written."""
        return structlog.is_configured()

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Tell that a part of the telemetry broke and is off."""
        self.emit(
            names.TELEMETRY_DISABLED,
            observer=observer,
            error_type=error_type(error),
            error=error_message(error),
        )

    def set_identity(self, identity: ProcessIdentity) -> None:
        """Put another identity on the events from here on."""
        self._identity = identity

    def reset(self) -> None:
        """Let go of what the parent's threads may have held."""
        self._lock = threading.Lock()
        self._told = {}

    def _tell(self, operation: Operation, event: str, **facts: Any) -> None:
        store = operation.store
        suppressed_count = self._suppressed(
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
            facts["trace_id"] = operation.trace_id
            facts["span_id"] = operation.span_id
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
            **facts,
        )

    def _suppressed(self, place: Place) -> int | None:
        """Count the events held back at a place, or None to hold back this one."""
        now = self._recorder.ticks()
        with self._lock:
            last, suppressed_count = self._told.get(place, (None, 0))
            if last is not None and now - last < _REPEAT_AFTER_NS:
                self._told[place] = (last, suppressed_count + 1)
                return None
            if len(self._told) >= _MOST_PLACES:
                self._told.clear()
            self._told[place] = (now, 0)
            return suppressed_count

    def _logger(self) -> Any:
        # Asked for each time: the application may configure structlog after us,
        # and may replace sys.stderr.
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
                _what_and_when_first,
                renderer,
            ],
            wrapper_class=structlog.BoundLogger,
        )


class _StandardError:
    """Writes lines to whatever standard error is now.

    structlog's own WriteLogger holds a lock while it writes, which a fork in another
    thread would copy into the child for good.
    """

    def write(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = write


def _what_and_when_first(
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
