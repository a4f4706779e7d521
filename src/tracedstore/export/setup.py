"""The composition root: sets up, replaces and ends the telemetry of a process.

All parts meet here, and only here. What has threads or counts of its own is also reset
here in a forked child, and ended here when the process ends.
"""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

import torch.distributed as dist
from opentelemetry._logs import LoggerProvider
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from tracedstore import names
from tracedstore.common import threads
from tracedstore.common.errors import StalledJobError
from tracedstore.common.identity import process_identity, set_group_identity
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination import rank_registry, store_access
from tracedstore.diagnosis.ask.responder import AGENT_RESPONDER
from tracedstore.diagnosis.connection import connection_attempt
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe import torch_keys, waits
from tracedstore.diagnosis.observe.polls import POLLS
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.diagnosis.stall_action import EndProcess
from tracedstore.export import discovery
from tracedstore.export.http_endpoint import HttpEndpoint
from tracedstore.export.otel_export import RECORD_WRITER, Providers, Push
from tracedstore.export.report_files import REPORT_FILE
from tracedstore.export.settings import Settings
from tracedstore.local.facts import KEY_WRITERS, LAST_CALL
from tracedstore.local.sockets import LOCAL_SOCKET
from tracedstore.recording import store_proxy
from tracedstore.recording.counters import Call, thread_names
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import (
    RECORDER,
    SYSTEM_CLOCK,
    Clock,
    Observer,
    budget_of,
)
from tracedstore.recording.snapshot import Exemplars, Snapshots
from tracedstore.recording.telemetry import (
    NULL_TELEMETRY,
    TELEMETRY,
    SharedParent,
    Telemetry,
)
from tracedstore.recording.watcher import WATCHER, Watch
from tracedstore.signals import inflight
from tracedstore.signals.events import Events
from tracedstore.signals.metrics import MetricsCollector
from tracedstore.signals.spans import Spans

# Seconds between two looks while a store does not respond.
_HANG_INTERVAL = 1.0
# The exit code of a process that is ended because its job hangs, as after an exception
# that nobody has caught.
_ABORTED: Final = 1
# Seconds between two attempts to start threads.
_START_INTERVAL = 10.0
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


class StallWatch:
    """The stall reports and the diagnosis of a process.

    Args:
        telemetry: What they are emitted through.
        stall_after: Seconds after which a call is stalled; 0 for never.
        answers: This process answers questions about what it does.
        collectives: The collectives of its process groups are watched.
        end_process: Ends the process after a verdict that has held; None for never.

    Attributes:
        observers: What has to observe notable calls, so that questions can be answered.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        stall_after: float,
        *,
        answers: bool,
        collectives: bool = True,
        end_process: EndProcess | None = None,
    ) -> None:
        self._after = stall_after
        self._diagnosis = Diagnosis(
            RECORDER,
            stall_after,
            answers=answers,
            collectives=collectives,
            end_process=end_process,
        )
        self._reporter = inflight.StallReporter(
            RECORDER,
            telemetry,
            stall_after,
            self._diagnosis.covers,
            self._diagnosis.absent_key,
        )
        self._watch: Watch | None = None
        # When to look next whether the threads run, by ``time.monotonic``.
        self._start_at = 0.0
        self._lock = threading.RLock()
        self.observers: tuple[Observer, ...] = (
            *((KEY_WRITERS, LAST_CALL) if answers else ()),
            *((POLLS,) if stall_after else ()),
        )

    def start(self) -> None:
        """Watch from now on, unless that is so.

        A thread that could not be started is started by a later call.
        """
        now = time.monotonic()
        with self._lock:
            if not self._after or now < self._start_at:
                return
            if self._watch is None:
                self._watch = Watch(names.INFLIGHT, self._report, self._after)
            self._start_at = now + _START_INTERVAL
        if self._watch not in WATCHER.watches:
            RECORDER.failures.guarded(names.INFLIGHT, WATCHER.add, self._watch)
        if not self._diagnosis.is_running:
            RECORDER.failures.guarded(names.DIAGNOSIS, self._diagnosis.start)

    def explain(self, call: Call, error: BaseException | None) -> Mapping[str, Any]:
        """Return event fields on whom a call waited for."""
        return self._diagnosis.explain(call, error)

    def stop(self, timeout: float) -> None:
        """Watch no more, and end the threads within the timeout."""
        self._diagnosis.stop(timeout)
        if self._watch is not None:
            WATCHER.remove(self._watch)
            WATCHER.stop_if_idle(timeout)

    def reset(self) -> None:
        """Forget the parent's calls and threads, as a forked child must."""
        self._lock = threading.RLock()
        self._watch = None
        self._start_at = 0.0
        self._reporter.reset()
        self._diagnosis.reset()
        KEY_WRITERS.reset()
        LAST_CALL.reset()
        POLLS.reset()

    def _report(self) -> float:
        RECORDER.resume_recording()
        hangs = RECORDER.failures.guarded(names.DIAGNOSIS, self._diagnosis.check_stores)
        delay = self._reporter.report()
        return min(delay, _HANG_INTERVAL) if hangs else delay


class ConfiguredTelemetry(Telemetry):
    """The telemetry of a process, as configured."""

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
        self._report_dir = None if settings.disabled else settings.report_dir
        # Raises before the telemetry that was set up before is stopped.
        self._endpoint = HttpEndpoint(settings, registry, identity)
        self.push = Push(settings, providers, previous)
        self._registry = registry
        self._spans = Spans(
            RECORDER,
            identity,
            providers.tracer,
            count_suppressed=settings.spans == "budget",
            on_provider=_join_provider,
        )
        self._exemplars = Exemplars(RECORDER.series)
        snapshots = Snapshots(
            RECORDER,
            self._exemplars,
            full=settings.metrics == "full",
            suppressed_by_caller=lambda: self._spans.suppressed_by_caller,
            events_dropped=lambda: (
                _event_writer.dropped
                + RECORD_WRITER.dropped
                + REPORT_FILE.writer.dropped
            ),
        )
        self._metrics = MetricsCollector(snapshots)
        self._pushed = snapshots
        self._events = Events(
            RECORDER,
            identity,
            _event_writer,
            log_format="off" if settings.disabled else settings.log_format,
            records=self.push.records,
            report=None if self._report_dir is None else REPORT_FILE.write,
        )
        self._stall_watch = StallWatch(
            self,
            settings.stall_after,
            answers=settings.answers,
            collectives=settings.collectives,
            end_process=self._end_process if settings.on_stall == "abort" else None,
        )
        self._observers: tuple[Observer, ...] = (
            *([self._spans] if settings.spans != "off" else []),
            self._exemplars,
            self._events,
            *self._stall_watch.observers,
            *more_observers,
        )
        # The functions themselves: every barrier asks, and a call more costs.
        self.defer = _deferred.submit  # type: ignore[method-assign]
        self.emits_debug_events = self._events.emits_debug_events  # type: ignore[method-assign]
        if settings.spans != "off":
            self.tracing_enabled = self._spans.enabled  # type: ignore[method-assign]
        self._clock = clock
        self._settings = settings
        # Seconds that the telemetry may delay the end of the process.
        self.exit_timeout = settings.exit_timeout

    # What the package emits through, as `recording.telemetry.TELEMETRY`.

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

    def add_shared_span(
        self,
        shared: SharedParent,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        ended_ns: int,
        parent: Context | None,
    ) -> None:
        """Make the shared parent of other spans."""
        self._spans.add_shared(
            shared,
            name,
            attributes=attributes,
            started_ns=started_ns,
            ended_ns=ended_ns,
            parent=parent,
        )

    def flush(self, timeout: float) -> None:
        """Make and export spans; return after the timeout at the latest."""
        left = threads.countdown(timeout)
        _deferred.flush(left())
        self.push.flush_spans(left())

    def thread_called(self) -> None:
        """Watch the calls in flight from a process's first call on.

        A forked child gets its watch here, its export of metrics and its file: it has
        the parent's telemetry, but not the parent's threads.
        """
        self._stall_watch.start()
        REPORT_FILE.start()
        self._guarded_push()

    def explain_wait(
        self, call: Call, error: BaseException | None
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
        REPORT_FILE.enable(self._report_dir)
        REPORT_FILE.start()
        TELEMETRY.install(self)
        RECORDER.observers.set(self._observers)
        if RECORDER.counters:
            self.thread_called()
        try:
            self._metrics.register(self._registry)
        except Exception as error:
            RECORDER.failures.add(names.METRICS_OBSERVER, error)
        RECORDER.rests_until = None
        RECORDER.on = not settings.disabled
        self._guarded_push()
        LOCAL_SOCKET.enable(on=settings.answers and not settings.disabled)
        RECORDER.failures.guarded(
            names.ENDPOINT, self._endpoint.start, self._events.emit
        )

    def _end_process(self, verdict: Verdict, lasts: Callable[[], bool]) -> None:
        """End this process with a verdict as its error, in the diagnosis thread.

        The main thread is in C++ and does not return to Python: no exception reaches
        it, no handler of a signal runs, and neither do hooks of atexit. What they would
        write is written here.
        """
        left = threads.countdown(self.exit_timeout)
        with suppress(Exception):
            threads.run_with_timeout(min(1.0, left()), _flush_output)
        if not lasts():
            return
        RECORDER.cold.record((names.JOB_ABORTS, (verdict.cause,), 1))
        self.emit(names.JOB_ABORTED, **verdict.event_fields())
        RECORDER.failures.guarded(names.DIAGNOSIS, _write_error_file, verdict)
        _event_writer.flush(left())
        _deferred.flush(left())
        self.push.end(left(), own_only=True)
        # A call that has failed meanwhile has its own exception, with this note: the
        # program may be about to save something.
        if lasts():
            os._exit(_ABORTED)

    def _guarded_push(self) -> None:
        RECORDER.failures.guarded(names.OTEL_METRICS, self.push.start, self._pushed)

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
        self._exemplars.reset()
        self._events.reset()
        self._stall_watch.reset()
        self.push.reset()
        self._endpoint.reset()


def _flush_output() -> None:
    """Write what the program has printed, as an exit of Python does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or the program's own
            stream.flush()


def _write_error_file(verdict: Verdict) -> None:
    """Write the file from which torchrun has the error of a worker."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    # Not at the top: it imports torchrun's agent.
    from torch.distributed.elastic.multiprocessing import errors  # noqa: PLC0415

    try:
        # The handler writes the traceback of what is being handled.
        raise StalledJobError(verdict.describe())  # noqa: TRY301
    except StalledJobError as error:
        errors.get_error_handler().record_exception(error)


# The providers whose flush makes the spans that are late, with what makes spans there
# that have given ids.
_joined: WeakTable[Callable[[SharedParent], Tracer | None]] = WeakTable()
# Seconds; only where a thread of a process group is in a Store call at exit. Such a
# call ends by its store's timeout, which is this long by torch's default.
_MAX_WAIT_AT_EXIT = 1800.0
# Seconds that C++ gets after such a call to release Python objects, an exception
# mostly, or to make its next call.
_SETTLE_AT_EXIT = 0.5
# Seconds for calls of other threads to end when the process ends.
_IN_FLIGHT = 0.1
_UNSEEN_CALLS = 0.005


class _Process:
    """What is set up in this process.

    Attributes:
        telemetry: The telemetry, None if there is none.
        lock: Held while the telemetry is replaced.
    """

    def __init__(self) -> None:
        self.telemetry: ConfiguredTelemetry | None = None
        self.reset()

    def reset(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold it."""
        self.lock = threading.RLock()


_process = _Process()


def _join_provider(
    provider: TracerProvider,
) -> Callable[[SharedParent], Tracer | None] | None:
    """Make the spans that are late whenever a provider of the SDK is flushed.

    Returns:
        What returns a tracer of its spans with given ids.
    """
    if hasattr(provider, "add_span_processor") and provider not in _joined:
        # The SDK is imported only where it is used.
        from tracedstore.export.tracer_provider import LateSpans, tracer_with_ids  # noqa: PLC0415

        _joined.set(provider, tracer_with_ids(provider))
        provider.add_span_processor(LateSpans(_deferred.flush, provider))
    return _joined.get(provider)


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
    with _process.lock:
        replacement = ConfiguredTelemetry(
            settings,
            registry,
            providers,
            clock,
            observers,
            None if _process.telemetry is None else _process.telemetry.push,
        )
        if _process.telemetry is not None:
            # To the provider that they belong to.
            _deferred.flush(1.0)
            _process.telemetry.stop(timeout=1.0)
            _process.telemetry.push.end_unused(1.0, replacement.push)
        _process.telemetry = replacement
        _set_hooks()
        replacement.start()


def ensure_configured() -> None:
    """Set up the telemetry from the environment, unless it is set up.

    Raises:
        ConfigurationError: A ``TRACEDSTORE_*`` variable has an unusable value.
    """
    if _process.telemetry is None:
        off_main_thread(_configure_once)


def _configure_once() -> None:
    with _process.lock:
        if _process.telemetry is None:
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
    return _process.telemetry is not None and RECORDER.on


def set_identity(rank: int, world_size: int) -> None:
    """Put the rank of the default process group on spans, events and ``/inflight``."""
    off_main_thread(_set_identity, rank, world_size)


def _set_identity(rank: int, world_size: int) -> None:
    with _process.lock:
        set_group_identity(rank, world_size)
        if _process.telemetry is not None:
            _process.telemetry.update_identity()


def shutdown(timeout: float = 5.0) -> None:
    """Flush and end the telemetry of this process, in bounded time.

    Wrapped stores keep working and are not recorded any more. `configure` and `wrap`
    set the telemetry up again.

    Args:
        timeout: Seconds after which to return, flushed or not.
    """
    off_main_thread(_shut_down, threads.countdown(timeout))


def _shut_down(left: Callable[[], float]) -> None:
    with _process.lock:
        ended, _process.telemetry = _process.telemetry, None
        if ended is None:
            return
        _deferred.stop(left())
        ended.stop(left())
    LOCAL_SOCKET.stop(left())
    ended.push.end(left(), own_only=False)
    _event_writer.stop(left())
    REPORT_FILE.stop(left())


def in_flight() -> list[inflight.InFlight]:
    """Return the Store calls of this process that have not returned, oldest first."""
    return inflight.in_flight(RECORDER)


@cache
def _set_hooks() -> None:
    """Set the hooks, once: a fork hook cannot be removed."""
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """End what runs, within ``exit_timeout``, and then wait for torch's own calls."""
    telemetry = _process.telemetry
    if telemetry is not None:
        left = threads.countdown(telemetry.exit_timeout)
        threads.end_pauses()
        WATCHER.stop(left())
        _deferred.stop(left())
        LOCAL_SOCKET.stop(left())
        telemetry.stop(left())
        # The application ends its own providers.
        telemetry.push.end(left(), own_only=True)
        _event_writer.stop(left())
        REPORT_FILE.stop(left())
        threads.end_bounded_threads()
        store_access.end_connections()
        threads.join_bounded_threads(left())
        _hold_other_threads(left())
    _wait_for_native_calls(
        5.0 if _process.telemetry is None else _process.telemetry.exit_timeout
    )


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


def _wait_for_native_calls(timeout: float) -> None:
    """Wait until no thread that Python did not start is in a call of the Python base.

    Such a call returns through Python. If that happens while the interpreter
    finalizes, CPython before 3.14 ends the thread in a way that makes C++ abort.
    torch waits for the threads of a process group when that is freed, with a bare
    store too, so their calls are waited for until they end. Other threads are not
    waited for with a bare store, so the wait for theirs is bounded.

    Args:
        timeout: Seconds to wait where there is no process group.
    """
    limit = _MAX_WAIT_AT_EXIT if dist.is_initialized() else timeout
    deadline = time.monotonic() + limit
    last_seen = None
    while (now := time.monotonic()) < deadline:
        if _in_native_call():
            last_seen = now
        elif last_seen is None or now - last_seen > _SETTLE_AT_EXIT:
            return
        time.sleep(0.01)


def _in_native_call() -> bool:
    """Return whether a thread that Python did not start is in a Store call.

    It has Python frames only during a call, whether the call is recorded or not.
    """
    known = thread_names()
    return any(
        frame.f_code.co_filename == store_proxy.__file__
        for thread_id, innermost in sys._current_frames().items()  # noqa: SLF001
        if thread_id not in known
        for frame, _ in traceback.walk_stack(innermost)
    )


def _after_fork() -> None:
    _process.reset()
    threads.reset()
    _deferred.reset()
    _event_writer.reset()
    REPORT_FILE.reset()
    WATCHER.reset()
    rank_registry.reset()
    torch_keys.forget_groups()
    waits.PENDING.clear()
    AGENT_RESPONDER.reset()
    stall_reports.reset()
    connection_attempt.reset()
    discovery.reset()
    if _process.telemetry is not None:
        _process.telemetry.reset()
    # Also after `shutdown`: the child may configure again.
    RECORDER.reset()
