"""The one interface through which the package emits telemetry.

Code below `export` emits events and spans without knowing structlog, the OpenTelemetry
SDK or the settings. It is given a `Telemetry`. `export.setup` provides the real one and
installs it in `TELEMETRY`; until then `TELEMETRY` emits nothing.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tracedstore import names

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from tracedstore.recording.counters import Call

_logger = logging.getLogger(names.SCOPE)


class SharedParent(NamedTuple):
    """The parent of spans of many processes, which is no span itself.

    Attributes:
        trace_id: The id of the trace.
        span_id: The id that the spans have as their parent's.
    """

    trace_id: int
    span_id: int


class Telemetry(Protocol):
    """Emits events and spans."""

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Emit a structured event, with its own level unless another one is given."""

    def emits_debug_events(self) -> bool:
        """Return whether events of debug level are written."""

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Report that a part of the telemetry raised."""

    def tracing_enabled(self) -> bool:
        """Return whether spans started now are recorded."""

    def start_span(
        self,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        parent: "Context | None",
        shared: SharedParent | None = None,
    ) -> "Span | None":
        """Start a span; return None where there is no tracer provider.

        It is a child of the shared parent, if there is one. If the context ``parent``
        has a span, it is a child of that, and links to the shared one.
        """

    def defer(self, work: Callable[[], object]) -> None:
        """Make a span or an event a moment later, in a thread.

        Counts a failure if too much of that is waiting.
        """

    def flush(self, timeout: float) -> None:
        """Export finished spans; return after the timeout at the latest."""

    def thread_called(self) -> None:
        """Note that a thread made its first Store call."""

    def explain_wait(
        self, call: "Call", error: BaseException | None
    ) -> Mapping[str, Any]:
        """Return event fields on whom a call that ended waited for.

        The exception that ended it gets the same as a note.
        """

    def rank_registers(self) -> None:
        """Note that this process is about to register its rank in a store."""


class NullTelemetry:
    """Emits nothing. Failures go to the standard library's logging."""

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Drop the event."""

    def emits_debug_events(self) -> bool:
        """Return False."""
        return False

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Log the failure."""
        _logger.error(
            "%s: %s raised %r; the job is not affected",
            names.TELEMETRY_DISABLED,
            observer,
            error,
        )

    def tracing_enabled(self) -> bool:
        """Return False."""
        return False

    def start_span(
        self,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        parent: "Context | None",
        shared: SharedParent | None = None,
    ) -> "Span | None":
        """Return None."""

    def defer(self, work: Callable[[], object]) -> None:
        """Drop it."""

    def flush(self, timeout: float) -> None:
        """Return at once."""

    def thread_called(self) -> None:
        """Do nothing."""

    def explain_wait(
        self,
        call: "Call",  # noqa: ARG002 - of the protocol
        error: BaseException | None,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def rank_registers(self) -> None:
        """Do nothing."""


NULL_TELEMETRY: Final = NullTelemetry()


class ProxyTelemetry:
    """Forwards to the telemetry that is installed, to `NULL_TELEMETRY` without one.

    `configure` replaces the telemetry of a process at any time. Code that holds this
    proxy follows.

    Attributes:
        emits_debug_events: That of the telemetry, as it is: every barrier asks.
        tracing_enabled: The same.
        defer: The same.
        is_null: No telemetry is installed.
    """

    def __init__(self) -> None:
        self.install(NULL_TELEMETRY)

    def install(self, telemetry: Telemetry) -> None:
        """Forward to this telemetry from now on."""
        self._installed = telemetry
        self.emits_debug_events = telemetry.emits_debug_events
        self.tracing_enabled = telemetry.tracing_enabled
        self.defer = telemetry.defer
        self.is_null = telemetry is NULL_TELEMETRY

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Forward."""
        self._installed.emit(event, level=level, **fields)

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Forward."""
        self._installed.report_failure(observer, error)

    def start_span(
        self,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        parent: "Context | None",
        shared: SharedParent | None = None,
    ) -> "Span | None":
        """Forward."""
        return self._installed.start_span(
            name,
            attributes=attributes,
            started_ns=started_ns,
            parent=parent,
            shared=shared,
        )

    def flush(self, timeout: float) -> None:
        """Forward."""
        self._installed.flush(timeout)

    def thread_called(self) -> None:
        """Forward."""
        self._installed.thread_called()

    def explain_wait(
        self, call: "Call", error: BaseException | None
    ) -> Mapping[str, Any]:
        """Forward."""
        return self._installed.explain_wait(call, error)

    def rank_registers(self) -> None:
        """Forward."""
        self._installed.rank_registers()


# One a process, like OpenTelemetry's global tracer provider. Events and spans are a
# process's, not a store's: `configure` has to reach every store and barrier.
TELEMETRY: Final = ProxyTelemetry()
