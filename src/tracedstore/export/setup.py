"""Switch the telemetry of a process on, change it, and end it."""

import atexit
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from tracedstore import names
from tracedstore.coordination import barrier, rank_registry
from tracedstore.core.budget import Budget, Unlimited, nothing
from tracedstore.core.clock import SYSTEM_CLOCK, Clock
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.observer import Observer
from tracedstore.core.recorder import RECORDER
from tracedstore.export.endpoint import Endpoint, access_of
from tracedstore.export.settings import Settings
from tracedstore.export.shutdown import in_time, let_native_calls_end
from tracedstore.signals import inflight
from tracedstore.signals.events import Events
from tracedstore.signals.metrics import MetricsCollector
from tracedstore.signals.spans import Spans, process_attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider


_logger = logging.getLogger(names.SCOPE)


class _Telemetry:
    """What is switched on in this process."""

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        provider: TracerProvider | None,
        clock: Clock,
        more_observers: Iterable[Observer],
    ) -> None:
        identity = _identity()
        # Whether it can be used is known before what was set up before is stopped.
        access = access_of(settings)
        self._serve = partial(Endpoint, settings, access, registry, identity)
        self._endpoint: Endpoint | None = None
        self.provider = provider
        self.own_provider: SDKTracerProvider | None = None
        if settings.tracing and provider is None:
            # The SDK is loaded only where it is asked for.
            from tracedstore.export.tracing import set_up_provider  # noqa: PLC0415

            self.own_provider = set_up_provider(process_attributes(identity))
        never = float("inf")
        self._registry = registry
        self._spans = Spans(
            RECORDER, identity, provider, count_the_rest=settings.spans == "budget"
        )
        self._metrics = MetricsCollector(
            RECORDER, lambda: self._spans.suppressed_by_caller
        )
        self._events = Events(
            RECORDER,
            identity,
            log_format="off" if settings.disabled else settings.log_format,
            blocked_after=settings.stall_after or never,
            contended_after=settings.contended_after,
        )
        self._watch = (
            inflight.StallWatch(RECORDER, self._events.emit, settings.stall_after)
            if settings.stall_after
            else None
        )
        self._observers: tuple[Observer, ...] = (
            *([self._spans] if settings.spans != "off" else []),
            self._metrics,
            self._events,
            *more_observers,
        )
        self._clock = clock
        self._settings = settings

    def start(self) -> None:
        """Switch on."""
        settings = self._settings
        RECORDER.use_clock(self._clock)
        RECORDER.slow_ns = int(settings.slow_after * 1e9)
        RECORDER.contended_after = settings.contended_after
        RECORDER.budget = _budget(settings)
        RECORDER.failures.reset()
        RECORDER.failures.report = self._events.report_failure
        RECORDER.emit = self._events.emit
        RECORDER.detailed = self._events.detailed
        RECORDER.flush = self.flush
        RECORDER.start_span = self._spans.start
        RECORDER.tracing = self._tracing
        RECORDER.observers.set(self._observers)
        if self._watch is not None:
            # The watch starts with the first call, here and in a forked child.
            RECORDER.counters.on_first_call = self._watch.ensure_running
            if RECORDER.counters:
                self._watch.ensure_running()
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
        if settings.http_port is not None and not settings.disabled:
            self._start_endpoint()

    def _start_endpoint(self) -> None:
        try:
            self._endpoint = self._serve()
            self._events.emit(names.TELEMETRY_SERVING, url=self._endpoint.url)
            rank_registry.set_metrics_address(self._endpoint.url)
        except Exception as error:
            RECORDER.failures.add(names.ENDPOINT, error)

    def _tracing(self) -> bool:
        on = RECORDER.on and self._settings.spans != "off"
        return on and self._spans.wanted()

    def flush(self, timeout: float) -> None:
        """Have spans exported; return in time, exported or not."""
        in_time(self._flush, timeout)

    def end(self, timeout: float) -> None:
        """Have spans exported, and end what was set up for them, in time."""
        in_time(self._end, timeout)

    def _flush(self, timeout: float) -> None:
        provider = self.own_provider or self.provider or trace.get_tracer_provider()
        # The API has no force_flush, the SDK's provider does.
        force_flush = getattr(provider, "force_flush", None)
        if force_flush is not None:
            force_flush(int(timeout * 1000))

    def _end(self, timeout: float) -> None:
        self._flush(timeout)
        if self.own_provider is not None:
            self.own_provider.shutdown()

    def stop(self, timeout: float) -> None:
        """Switch off; what was counted stays counted."""
        RECORDER.on = False
        RECORDER.counters.on_first_call = None
        RECORDER.observers.set(())
        if self._endpoint is not None:
            self._endpoint.stop(timeout)
            rank_registry.set_metrics_address(None)
        if self._watch is not None:
            self._watch.stop(timeout)
        with suppress(KeyError):  # it is not there if registering failed
            self._registry.unregister(self._metrics)

    def set_identity(self, identity: ProcessIdentity) -> None:
        """Put another identity on what is told from here on."""
        self._spans.set_identity(identity)
        self._events.set_identity(identity)

    def reset(self) -> None:
        """Be the child's: nothing counted, nothing in flight, no thread."""
        self._spans.suppressed_by_caller = 0
        self._metrics.reset()
        self._events.reset()
        if self._endpoint is not None:
            self._endpoint.reset()
            self._endpoint = None
        if self._watch is not None:
            self._watch.reset()
        RECORDER.reset()


_telemetry: _Telemetry | None = None
# The rank and world size of the default process group, which say more than the
# environment: it may have none (``tcp://``, mp.spawn).
_in_group: tuple[int, int] | None = None
_lock = threading.RLock()
_hooks_set = False


def configure(
    *,
    registry: CollectorRegistry | None = None,
    tracer_provider: TracerProvider | None = None,
    observers: Iterable[Observer] = (),
    clock: Clock = SYSTEM_CLOCK,
    disabled: bool | None = None,
    spans: str | None = None,
    span_rate: float | None = None,
    span_burst: int | None = None,
    slow_after: float | None = None,
    stall_after: float | None = None,
    contended_after: int | None = None,
    log_format: str | None = None,
    tracing: bool | None = None,
    http_port: int | None = None,
    http_host: str | None = None,
    http_token: str | None = None,
    http_basic_auth: str | None = None,
    http_cert: str | None = None,
    http_key: str | None = None,
    http_client_ca: str | None = None,
) -> None:
    """Set up the telemetry of this process, or set it up anew.

    Calling it is optional: the first `wrap` does, with nothing but the environment.
    A setting that is not given is taken from its ``TRACEDSTORE_*`` variable; see
    `tracedstore.Settings` for what each means. Stores wrapped before follow.

    Args:
        registry: Where Prometheus finds the metrics, instead of prometheus_client's
            default registry.
        tracer_provider: Where spans go, instead of OpenTelemetry's global provider.
        observers: More observers, told of the same calls as our own.
        clock: Where time is taken from; for tests.
        disabled: Record nothing; wrapped stores only forward.
        spans: Which calls get a span: ``budget``, ``notable``, ``all`` or ``off``.
        span_rate: Spans a second for ordinary calls.
        span_burst: How many of those at once.
        slow_after: Seconds from which a call is slow.
        stall_after: Seconds after which a call in flight is reported; 0 for never.
        contended_after: Compare-and-sets lost in a row that are reported.
        log_format: ``auto``, ``json``, ``console`` or ``off``.
        tracing: Set up an OpenTelemetry TracerProvider from the ``OTEL_*``
            variables, unless the application has one.
        http_port: Serve metrics over HTTP from this port on; 0 for any.
        http_host: The address to listen at, instead of loopback.
        http_token: A token that clients must bear.
        http_basic_auth: ``user:password`` that clients may give instead.
        http_cert: The file with the certificate, to serve HTTPS.
        http_key: The file with its key.
        http_client_ca: The file with the authorities of clients' certificates.

    Raises:
        ConfigurationError: A setting has a value that cannot be used. What was set
            up before stays.
    """
    given = locals()  # a setting is a keyword of the same name
    global _telemetry  # noqa: PLW0603 - one telemetry a process
    settings = Settings.load(given)
    with _lock:
        replacement = _Telemetry(
            settings,
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
    """Set up the telemetry from the environment, unless it is set up."""
    with _lock:
        if _telemetry is None:
            configure()


def set_identity(rank: int, world_size: int) -> None:
    """Put the rank that the process group gave this process on what is told of it."""
    global _in_group  # noqa: PLW0603 - one rank a process
    with _lock:
        if _in_group != (rank, world_size):
            _in_group = rank, world_size
            if _telemetry is not None:
                _telemetry.set_identity(_identity())


def _identity() -> ProcessIdentity:
    known = ProcessIdentity.from_environment(os.environ)
    if _in_group is None:
        return known
    rank, world_size = _in_group
    return replace(known, rank=rank, world_size=world_size)


def shutdown(timeout: float = 5.0) -> None:
    """Flush and end the telemetry of this process, in bounded time.

    Wrapped stores go on working and are not recorded any more. `configure` and
    `wrap` switch it on again.

    Args:
        timeout: Seconds after which to return, flushed or not.
    """
    global _telemetry
    with _lock:
        ended, _telemetry = _telemetry, None
        if ended is None:
            return
        ended.stop(timeout)
    ended.end(timeout)


def in_flight() -> list[inflight.InFlight]:
    """List the Store calls of this process that have not returned, oldest first."""
    return inflight.in_flight(RECORDER)


def _budget(settings: Settings) -> Budget:
    if settings.spans == "all":
        return Unlimited()
    if settings.spans == "budget":
        return Budget(settings.span_rate, settings.span_burst)
    return nothing()


def _set_hooks() -> None:
    global _hooks_set  # noqa: PLW0603 - a fork hook cannot be taken back
    if not _hooks_set:
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(let_native_calls_end)
        _hooks_set = True


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the parent's other threads may hold it
    _lock = threading.RLock()
    barrier.reset()
    if _telemetry is not None:
        _telemetry.reset()


# For those that stand below this and have to be first sometimes.
RECORDER.set_up = ensure_configured
