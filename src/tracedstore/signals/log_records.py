"""Events as OpenTelemetry log records.

A record has the line of the log as its body, so that queries for the log and
``tracedstore report`` read it too, and the fields of the event as attributes. It is
made in the thread that emits the event, and given to the LoggerProvider by a writer
thread: a provider may export synchronously.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from opentelemetry import trace
from opentelemetry._logs import LoggerProvider, SeverityNumber, get_logger_provider
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from tracedstore import names, otel_names
from tracedstore._version import __version__
from tracedstore.common.errors import TracedStoreError
from tracedstore.recording.queue_worker import Submit

_SEVERITIES: Final = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
}
# Fields that a record has as such.
_OF_TRACE: Final = ("trace_id", "span_id")


def application_provider() -> LoggerProvider | None:
    """Return the LoggerProvider that the application has set."""
    provider = get_logger_provider()
    # The API has no public name for the provider that stands in for one.
    return None if "Proxy" in type(provider).__name__ else provider


class LogRecords:
    """Emits events as log records.

    Args:
        submit: Queues a write.
        enabled: Returns whether records are wanted now.
        provider: Returns the LoggerProvider. The writer calls it, for it may create
            one.
    """

    def __init__(
        self,
        submit: Submit,
        enabled: Callable[[], bool],
        provider: Callable[[], LoggerProvider | None],
    ) -> None:
        self._submit = submit
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
        self._submit(partial(self._write, record))

    def _write(self, record: dict[str, Any]) -> None:
        provider = self._provider()
        if provider is None:
            return
        logger = provider.get_logger(
            names.SCOPE, __version__, schema_url=otel_names.SCHEMA_URL
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
