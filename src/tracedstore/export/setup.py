"""Sets up, replaces and ends the telemetry of a process."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from tracedstore import names
from tracedstore.coordination import rank_registry
from tracedstore.core import timeouts
from tracedstore.core.budget import budget_of
from tracedstore.core.clock import SYSTEM_CLOCK, Clock
from tracedstore.core.identity import process_identity, set_group_identity
from tracedstore.core.observer import Observer
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import NULL_TELEMETRY, TELEMETRY
from tracedstore.core.watcher import WATCHER
from tracedstore.diagnosis import groups
from tracedstore.diagnosis.local_socket import LOCAL_SOCKET
from tracedstore.export.endpoint import Endpoint, access_of
from tracedstore.export.settings import Settings
from tracedstore.export.shutdown import export_with_timeout, wait_for_native_calls
from tracedstore.export.stall_watch import StallWatch
from tracedstore.signals import inflight
from tracedstore.signals.event_writer import EventWriter
from tracedstore.signals.events import Events
from tracedstore.signals.metrics import MetricsCollector
from tracedstore.signals.spans import Spans, process_attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider

    from tracedstore.core.counters import Call

_logger = logging.getLogger(names.SCOPE)


class ConfiguredTelemetry:
    """The telemetry of a process, as configured; a `core.telemetry.Telemetry`."""

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        provider: TracerProvider | None,
        clock: Clock,
        more_observers: Iterable[Observer],
    ) -> None:
        identity = process_identity()
        # Raises before the telemetry that was set up before is stopped.
        access = access_of(settings)
        self._serve = partial(Endpoint, settings, access, registry, identity)
        self._endpoint: Endpoint | None = None
        self.provider = provider
        self.own_provider: SDKTracerProvider | None = None
        if settings.tracing and provider is None:
            # The SDK is imported only where it is used.
            from tracedstore.export.tracing import set_up_provider  # noqa: PLC0415

            self.own_provider = set_up_provider(process_attributes(identity))
        self._registry = registry
        self._spans = Spans(
            RECORDER, identity, provider, count_suppressed=settings.spans == "budget"
        )
        self._metrics = MetricsCollector(
            RECORDER,
            lambda: self._spans.suppressed_by_caller,
            lambda: _event_writer.dropped,
        )
        self._events = Events(
            RECORDER,
            identity,
            _event_writer.submit,
            log_format="off" if settings.disabled else settings.log_format,
        )
        self._stall_watch = StallWatch(
            self, settings.stall_after, answers=settings.answers
        )
        self._observers: tuple[Observer, ...] = (
            *([self._spans] if settings.spans != "off" else []),
            self._metrics,
            self._events,
            *self._stall_watch.observers,
            *more_observers,
        )
        self._clock = clock
        self._settings = settings

    @property
    def exit_timeout(self) -> float:
        """Seconds that the telemetry may delay the end of the process."""
        return self._settings.exit_timeout

    # What the package emits through, as `core.telemetry.TELEMETRY`.

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Write an event through structlog."""
        self._events.emit(event, level=level, **fields)

    def emits_debug_events(self) -> bool:
        """Return whether events of debug level are written."""
        return self._events.emits_debug_events()

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Emit `telemetry.disabled`."""
        self._events.report_failure(observer, error)

    def tracing_enabled(self) -> bool:
        """Return whether spans started now are recorded."""
        on = RECORDER.on and self._settings.spans != "off"
        return on and self._spans.enabled()

    def start_span(
        self,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        parent: Context | None,
        links: Sequence[Link] = (),
    ) -> Span | None:
        """Start a span; return None where there is no tracer provider."""
        return self._spans.start(
            name,
            attributes=attributes,
            started_ns=started_ns,
            parent=parent,
            links=links,
        )

    def flush(self, timeout: float) -> None:
        """Export finished spans; return after the timeout at the latest."""
        export_with_timeout(self._flush, timeout)

    def thread_called(self) -> None:
        """Watch the calls in flight from a process's first call on.

        A forked child gets its watch here: it has the parent's telemetry, but not the
        parent's watcher thread.
        """
        self._stall_watch.start()

    def explain_wait(
        self, call: "Call", error: BaseException | None
    ) -> Mapping[str, Any]:
        """Return event fields on whom a call waited for."""
        return self._stall_watch.explain(call, error)

    def rank_registers(self) -> None:
        """Answer questions from a process's first registration on."""
        RECORDER.failures.guarded(names.DIAGNOSIS, LOCAL_SOCKET.start)

    # What `configure`, `shutdown` and a fork do with it.

    def start(self) -> None:
        """Begin to record and emit."""
        settings = self._settings
        RECORDER.use_clock(self._clock)
        RECORDER.core = settings.core
        RECORDER.slow_ns = int(settings.slow_after * 1e9)
        never = float("inf")
        RECORDER.overdue_ns = (settings.stall_after or never) * 1e9
        RECORDER.contended_after = settings.contended_after
        RECORDER.budget = budget_of(
            settings.spans, settings.span_rate, settings.span_burst
        )
        RECORDER.failures.rearm()
        TELEMETRY.install(self)
        RECORDER.observers.set(self._observers)
        if RECORDER.counters:
            self.thread_called()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _logger.warning(
                "PROMETHEUS_MULTIPROC_DIR is set, but its files carry no custom"
                " collectors: serve the metrics of each process by itself"
            )
        try:
            self._registry.register(self._metrics)
        except Exception as error:
            RECORDER.failures.add(self._metrics.name, error)
        RECORDER.on = not settings.disabled
        LOCAL_SOCKET.enable(on=settings.answers and not settings.disabled)
        if settings.http_port is not None and not settings.disabled:
            RECORDER.failures.guarded(names.ENDPOINT, self._start_endpoint)

    def _start_endpoint(self) -> None:
        self._endpoint = self._serve()
        self._events.emit(names.TELEMETRY_SERVING, url=self._endpoint.url)
        rank_registry.set_metrics_address(self._endpoint.url)

    def stop(self, timeout: float) -> None:
        """Record and emit no more. Counts stay."""
        RECORDER.on = False
        TELEMETRY.install(NULL_TELEMETRY)
        RECORDER.observers.set(())
        if self._endpoint is not None:
            self._endpoint.stop(timeout)
            rank_registry.set_metrics_address(None)
        self._stall_watch.stop(timeout)
        with suppress(KeyError):  # it is not there if registering failed
            self._registry.unregister(self._metrics)

    def end(self, timeout: float) -> None:
        """Export finished spans and end the provider set up here, within a timeout."""
        export_with_timeout(self._end, timeout)

    def _flush(self, timeout: float) -> None:
        provider = self.own_provider or self.provider or trace.get_tracer_provider()
        # OpenTelemetry's API has no force_flush; the SDK's provider does.
        force_flush = getattr(provider, "force_flush", None)
        if force_flush is not None:
            force_flush(int(timeout * 1000))

    def _end(self, timeout: float) -> None:
        self._flush(timeout)
        if self.own_provider is not None:
            self.own_provider.shutdown()

    def update_identity(self) -> None:
        """Put the current identity of the process on spans and events."""
        identity = process_identity()
        self._spans.set_identity(identity)
        self._events.set_identity(identity)

    def reset(self) -> None:
        """Drop what is the parent's, as a forked child must: counts, calls, threads."""
        self._spans.suppressed_by_caller = 0
        self._metrics.reset()
        self._events.reset()
        self._stall_watch.reset()
        if self._endpoint is not None:
            self._endpoint.reset()
            self._endpoint = None


# One a process: events keep their order over a `configure`.
_event_writer = EventWriter(RECORDER.failures)
_telemetry: ConfiguredTelemetry | None = None
_lock = threading.RLock()
_hooks_set = False


def configure(
    *,
    registry: CollectorRegistry | None = None,
    tracer_provider: TracerProvider | None = None,
    observers: Iterable[Observer] = (),
    clock: Clock = SYSTEM_CLOCK,
    **settings: Any,
) -> None:
    """Set up the telemetry of this process, or replace it.

    Calling it is optional: the first `wrap` does so, from the environment alone.
    Stores that are wrapped already follow.

    Args:
        registry: The Prometheus registry, instead of prometheus_client's default one.
        tracer_provider: The tracer provider, instead of OpenTelemetry's global one.
        observers: Further observers of notable calls.
        clock: The clock; for tests.
        settings: Any setting of `tracedstore.Settings`, by its name. A setting that is
            not given, or is None, is read from its ``TRACEDSTORE_*`` variable.

    Raises:
        TypeError: There is no setting of this name.
        ConfigurationError: A setting has a value that cannot be used. The telemetry
            that was set up before stays.
    """
    global _telemetry  # noqa: PLW0603 - one telemetry a process
    loaded = Settings.load(settings)
    with _lock:
        replacement = ConfiguredTelemetry(
            loaded,
            REGISTRY if registry is None else registry,
            tracer_provider,
            clock,
            observers,
        )
        if _telemetry is not None:
            _telemetry.stop(timeout=1.0)
            replacement.own_provider = (
                replacement.own_provider or _telemetry.own_provider
            )
        _telemetry = replacement
        _set_hooks()
        replacement.start()


def ensure_configured() -> None:
    """Set up the telemetry from the environment, unless it is set up.

    Raises:
        ConfigurationError: A ``TRACEDSTORE_*`` variable has a value that cannot be
            used.
    """
    with _lock:
        if _telemetry is None:
            configure()


def try_to_configure(observer: str) -> bool:
    """Set up the telemetry for a caller that did not ask for it.

    Args:
        observer: The part of the telemetry that a failure is counted for.

    Returns:
        Whether calls are recorded. With a setting that cannot be used they are not,
        and the job runs as without this package.
    """
    try:
        ensure_configured()
    except Exception as error:
        RECORDER.failures.add(observer, error)
        return False
    return RECORDER.on


def set_identity(rank: int, world_size: int) -> None:
    """Put the rank of the default process group on spans, events and ``/inflight``."""
    with _lock:
        set_group_identity(rank, world_size)
        if _telemetry is not None:
            _telemetry.update_identity()


def shutdown(timeout: float = 5.0) -> None:
    """Flush and end the telemetry of this process, in bounded time.

    Wrapped stores keep working and are not recorded any more. `configure` and `wrap`
    set the telemetry up again.

    Args:
        timeout: Seconds after which to return, flushed or not.
    """
    global _telemetry
    with _lock:
        ended, _telemetry = _telemetry, None
        if ended is None:
            return
        ended.stop(timeout)
    deadline = time.monotonic() + timeout
    LOCAL_SOCKET.stop(timeout)
    ended.end(timeout)
    _event_writer.stop(max(0.0, deadline - time.monotonic()))


def in_flight() -> list[inflight.InFlight]:
    """Return the Store calls of this process that have not returned, oldest first."""
    return inflight.in_flight(RECORDER)


def _set_hooks() -> None:
    global _hooks_set  # noqa: PLW0603 - a fork hook cannot be removed
    if not _hooks_set:
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
        _hooks_set = True


def _at_exit() -> None:
    """End what runs, within ``exit_timeout``, and then wait for torch's own calls."""
    if _telemetry is not None:
        deadline = time.monotonic() + _telemetry.exit_timeout

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        WATCHER.stop(left())
        LOCAL_SOCKET.stop(left())
        _telemetry.stop(left())
        # The application ends its own provider.
        if _telemetry.own_provider is not None:
            _telemetry.end(left())
        _event_writer.stop(left())
        timeouts.join_bounded_threads(left())
    wait_for_native_calls()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it
    _lock = threading.RLock()
    timeouts.reset()
    _event_writer.reset()
    WATCHER.reset()
    rank_registry.reset()
    groups.reset()
    if _telemetry is not None:
        _telemetry.reset()
        RECORDER.reset()
