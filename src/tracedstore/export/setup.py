"""Sets up, replaces and ends the telemetry of a process."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry._logs import LoggerProvider
from opentelemetry.context import Context
from opentelemetry.trace import Span, TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from tracedstore import names
from tracedstore.common import timeouts
from tracedstore.common.clock import SYSTEM_CLOCK, Clock
from tracedstore.common.identity import process_identity, set_group_identity
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination import rank_registry, store_access
from tracedstore.diagnosis.ask.responder import AGENT_RESPONDER
from tracedstore.diagnosis.connection import connecting, connection_attempt
from tracedstore.diagnosis.observe import process_groups
from tracedstore.export import discovery
from tracedstore.export import shutdown as ending
from tracedstore.export.http_endpoint import Endpoint
from tracedstore.export.otel_export import RECORD_WRITER, Providers, Push
from tracedstore.export.settings import Settings
from tracedstore.export.stall_watch import StallWatch
from tracedstore.local.sockets import LOCAL_SOCKET
from tracedstore.recording.budget import budget_of
from tracedstore.recording.observer import Observer
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.snapshot import MetricSource, Snapshots
from tracedstore.recording.telemetry import NULL_TELEMETRY, TELEMETRY, SharedParent
from tracedstore.recording.watcher import WATCHER
from tracedstore.signals import inflight
from tracedstore.signals.events import Events
from tracedstore.signals.metrics import MetricsCollector
from tracedstore.signals.spans import Spans

if TYPE_CHECKING:
    from tracedstore.recording.counters import Call


# Seconds for the deferred work that is left when the process ends.
_DEFERRED_AT_EXIT = 1.0


def _flush_at_exit() -> None:
    # Whenever the thread starts, because hooks run in reverse order: there is a tracer
    # provider by then, and its own hook drops every later span.
    atexit.unregister(_deferred.flush)
    atexit.register(_deferred.flush, _DEFERRED_AT_EXIT)


# One a process: events keep their order over a `configure`.
_event_writer = QueueWorker(
    "tracedstore-events-writer", names.EVENTS, RECORDER.failures
)
# Spans and events of completed barriers.
_deferred = QueueWorker(
    "tracedstore-deferred",
    names.BARRIERS,
    RECORDER.failures,
    delay=0.1,
    counts_drops=True,
    on_start=_flush_at_exit,
)


class ConfiguredTelemetry:
    """The telemetry of a process, as configured; a `core.telemetry.Telemetry`."""

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        providers: Providers,
        clock: Clock,
        more_observers: Iterable[Observer],
        previous: Push | None,
    ) -> None:
        identity = process_identity()
        # Raises before the telemetry that was set up before is stopped.
        self._endpoint = Endpoint(settings, registry, identity)
        self.push = Push(settings, providers, previous)
        self._registry = registry
        self._spans = Spans(
            RECORDER,
            identity,
            providers.tracer,
            count_suppressed=settings.spans == "budget",
            on_provider=_flush_with_provider,
        )
        snapshots = partial(
            Snapshots,
            RECORDER,
            full=settings.metrics == "full",
            suppressed_by_caller=lambda: self._spans.suppressed_by_caller,
            events_dropped=lambda: _event_writer.dropped + RECORD_WRITER.dropped,
        )
        self._metrics = MetricsCollector(RECORDER, snapshots())
        self._source = MetricSource(
            RECORDER, snapshots(one_histogram=True), self._metrics.exemplar
        )
        self._events = Events(
            RECORDER,
            identity,
            _event_writer.submit,
            log_format="off" if settings.disabled else settings.log_format,
            records=self.push.records,
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
        self.defer = _deferred.submit
        self.emits_debug_events = self._events.emits_debug_events
        self.tracing_enabled = self._spans.enabled
        if settings.spans == "off":
            self.tracing_enabled = NULL_TELEMETRY.tracing_enabled
        self._clock = clock
        self._settings = settings
        # Seconds that the telemetry may delay the end of the process.
        self.exit_timeout = settings.exit_timeout

    # What the package emits through, as `core.telemetry.TELEMETRY`.

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Write an event through structlog."""
        off_main_thread(partial(self._events.emit, event, level=level, **fields))

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Emit `telemetry.disabled`."""
        off_main_thread(self._events.report_failure, observer, error)

    def start_span(
        self,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        parent: Context | None,
        shared: SharedParent | None = None,
    ) -> Span | None:
        """Start a span; return None where there is no tracer provider."""
        return self._spans.start(
            name,
            attributes=attributes,
            started_ns=started_ns,
            parent=parent,
            shared=shared,
        )

    def flush(self, timeout: float) -> None:
        """Make and export spans; return after the timeout at the latest."""
        left = timeouts.countdown(timeout)
        _deferred.flush(left())
        self.push.flush_spans(left())

    def thread_called(self) -> None:
        """Watch the calls in flight from a process's first call on.

        A forked child gets its watch here, and its export of metrics: it has the
        parent's telemetry, but not the parent's threads.
        """
        self._stall_watch.start()
        self._guarded_push()

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
        try:
            self._metrics.register(self._registry)
        except Exception as error:
            RECORDER.failures.add(self._metrics.name, error)
        RECORDER.rests_until = None
        RECORDER.on = not settings.disabled
        self._guarded_push()
        LOCAL_SOCKET.enable(on=settings.answers and not settings.disabled)
        RECORDER.failures.guarded(
            names.ENDPOINT, self._endpoint.start, self._events.emit
        )

    def _guarded_push(self) -> None:
        RECORDER.failures.guarded(names.OTEL_METRICS, self.push.start, self._source)

    def stop(self, timeout: float) -> None:
        """Record and emit no more. Counts stay."""
        RECORDER.rests_until = None
        RECORDER.on = False
        TELEMETRY.install(NULL_TELEMETRY)
        RECORDER.observers.set(())
        self._endpoint.stop(timeout)
        self._stall_watch.stop(timeout)
        with suppress(KeyError):  # it is not there if registering failed
            self._registry.unregister(self._metrics)

    def update_identity(self) -> None:
        """Put the current identity of the process on spans and events."""
        identity = process_identity()
        self._spans.set_identity(identity)
        self._events.set_identity(identity)

    def reset(self) -> None:
        """Drop what is the parent's, as a forked child must: counts, calls, threads."""
        self._spans.reset()
        self._metrics.reset()
        self._events.reset()
        self._stall_watch.reset()
        self.push.reset()
        self._endpoint.reset()


# The providers whose flush makes the spans that are late.
_flushed: WeakTable[bool] = WeakTable()
# Seconds for calls of other threads to end when the process ends.
_IN_FLIGHT = 0.1
_UNSEEN_CALLS = 0.005
_telemetry: ConfiguredTelemetry | None = None
_lock = threading.RLock()
_hooks_set = False


def _flush_with_provider(provider: TracerProvider) -> None:
    """Make the spans that are late whenever a provider of the SDK is flushed."""
    if hasattr(provider, "add_span_processor") and provider not in _flushed:
        # The SDK is imported only where it is used.
        from tracedstore.export.late_spans import LateSpans  # noqa: PLC0415

        _flushed.set(provider, True)
        provider.add_span_processor(LateSpans(_deferred.flush, provider))


def configure(
    *,
    registry: CollectorRegistry | None = None,
    tracer_provider: TracerProvider | None = None,
    logger_provider: LoggerProvider | None = None,
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
        logger_provider: The same for events as log records.
        observers: Further observers of notable calls.
        clock: The clock; for tests.
        settings: Any setting of `tracedstore.Settings`, by its name. A setting that is
            not given, or is None, is read from its ``TRACEDSTORE_*`` variable.

    Raises:
        TypeError: There is no setting of this name.
        ConfigurationError: A setting has a value that cannot be used. The telemetry
            that was set up before stays.
    """
    loaded = Settings.load(settings)
    providers = Providers(tracer=tracer_provider, logger=logger_provider)
    off_main_thread(
        _replace_telemetry,
        *(loaded, REGISTRY if registry is None else registry),
        *(providers, clock, observers),
    )


def _replace_telemetry(
    settings: Settings,
    registry: CollectorRegistry,
    providers: Providers,
    clock: Clock,
    observers: Iterable[Observer],
) -> None:
    global _telemetry  # noqa: PLW0603 - one telemetry a process
    with _lock:
        replacement = ConfiguredTelemetry(
            settings,
            registry,
            providers,
            clock,
            observers,
            None if _telemetry is None else _telemetry.push,
        )
        if _telemetry is not None:
            # To the provider that they belong to.
            _deferred.flush(1.0)
            _telemetry.stop(timeout=1.0)
            _telemetry.push.end_unused(1.0, replacement.push)
        _telemetry = replacement
        _set_hooks()
        replacement.start()


def ensure_configured() -> None:
    """Set up the telemetry from the environment, unless it is set up.

    Raises:
        ConfigurationError: A ``TRACEDSTORE_*`` variable has an unusable value.
    """
    if _telemetry is None:
        off_main_thread(_configure_once)


def _configure_once() -> None:
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
    RECORDER.failures.guarded(observer, ensure_configured)
    return _telemetry is not None and RECORDER.on


def set_identity(rank: int, world_size: int) -> None:
    """Put the rank of the default process group on spans, events and ``/inflight``."""
    off_main_thread(_set_identity, rank, world_size)


def _set_identity(rank: int, world_size: int) -> None:
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
    off_main_thread(_shut_down, timeouts.countdown(timeout))


def _shut_down(left: Callable[[], float]) -> None:
    global _telemetry
    with _lock:
        ended, _telemetry = _telemetry, None
        if ended is None:
            return
        _deferred.stop(left())
        ended.stop(left())
    LOCAL_SOCKET.stop(left())
    ended.push.end(left(), own_only=False)
    _event_writer.stop(left())


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
        left = timeouts.countdown(_telemetry.exit_timeout)
        timeouts.end_pauses()
        WATCHER.stop(left())
        _deferred.stop(left())
        LOCAL_SOCKET.stop(left())
        _telemetry.stop(left())
        # The application ends its own providers.
        _telemetry.push.end(left(), own_only=True)
        _event_writer.stop(left())
        timeouts.end_bounded_threads()
        store_access.end_connections()
        timeouts.join_bounded_threads(left())
        _hold_other_threads(left())
    ending.wait_for_native_calls(5.0 if _telemetry is None else _telemetry.exit_timeout)


def _hold_other_threads(timeout: float) -> None:
    """Let no thread of the job return from a traced call while Python finalizes."""
    RECORDER.ending = True
    if RECORDER.native is not None:
        RECORDER.native.end()
    if threading.active_count() == 1:
        return
    # Calls of the Python base that are in flight cannot be held. Most end at once, and
    # those that began after recording had ended cannot be seen.
    time.sleep(_UNSEEN_CALLS)
    own, deadline = threading.get_ident(), time.monotonic() + min(timeout, _IN_FLIGHT)
    while time.monotonic() < deadline and any(
        counters.call is not None and thread != own
        for thread, counters in list(RECORDER.counters.items())
    ):
        time.sleep(0.001)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it
    _lock = threading.RLock()
    timeouts.reset()
    _deferred.reset()
    _event_writer.reset()
    WATCHER.reset()
    rank_registry.reset()
    process_groups.reset()
    AGENT_RESPONDER.reset()
    connecting.reset()
    connection_attempt.reset()
    discovery.reset()
    if _telemetry is not None:
        _telemetry.reset()
    # Also after `shutdown`: the child may configure again.
    RECORDER.reset()
