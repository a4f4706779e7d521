"""The one interface through which the package emits telemetry, and its failures.

Code below `export` emits events and spans without knowing structlog, the OpenTelemetry
SDK or the settings. It is given a `Telemetry`. `export.setup` provides the real one and
installs it in `TELEMETRY`; until then `TELEMETRY` emits nothing.

Telemetry may fail; the job must not. `Failures` counts and reports what failed, and has
the ways to run a step that may fail.
"""

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tracedstore import names
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from tracedstore.recording.counters import Call

_logger = logging.getLogger(names.SCOPE)

# Seconds that a part of the telemetry rests after a failure.
REST: Final = 60.0


class SharedParent(NamedTuple):
    """The parent of spans of many processes, which one of them makes.

    Attributes:
        trace_id: The id of the trace.
        span_id: The id that the spans have as their parent's.
    """

    trace_id: int
    span_id: int


class Telemetry:
    """What a process emits events and spans through; this class emits nothing.

    Without real telemetry, failures go to the standard library's logging.
    """

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        """Emit a structured event, with its own level unless another one is given."""

    def emits_debug_events(self) -> bool:
        """Return whether events of debug level are written."""
        return False

    def report_failure(self, observer: str, error: BaseException) -> None:
        """Report that a part of the telemetry raised."""
        _logger.error(
            "%s: %s raised %r; the job is not affected",
            names.TELEMETRY_DISABLED,
            observer,
            error,
        )

    def tracing_enabled(self) -> bool:
        """Return whether spans started now are recorded."""
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
        """Start a span; return None where there is no tracer provider.

        It is a child of the shared parent, if there is one. If the context ``parent``
        has a span, there is one more, as a child of that, and each links to the other
        trace.
        """

    def add_shared_span(
        self,
        shared: SharedParent,
        name: str,
        *,
        attributes: Mapping[str, Any],
        started_ns: int,
        ended_ns: int,
        parent: "Context | None",
    ) -> None:
        """Make the shared parent of other spans; one process does."""

    def defer(self, work: Callable[[], object]) -> None:
        """Make a span or an event a moment later, in a thread.

        Counts a failure if too much of that is waiting.
        """

    def flush(self, timeout: float) -> None:
        """Export finished spans; return after the timeout at the latest."""

    def thread_called(self) -> None:
        """Note that a thread made its first Store call."""

    def explain_wait(
        self,
        call: "Call",  # noqa: ARG002 - of the interface
        error: BaseException | None,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Return event fields on whom a call that ended waited for.

        The exception that ended it gets the same as a note.
        """
        return {}

    def rank_registers(self) -> None:
        """Note that this process is about to register its rank in a store."""


NULL_TELEMETRY: Final = Telemetry()
_METHODS: Final = [name for name in vars(Telemetry) if not name.startswith("_")]


class InstalledTelemetry(Telemetry):
    """The telemetry that is installed: its methods are those of that one.

    `configure` replaces the telemetry of a process at any time. Code that holds this
    object follows, and pays for no call more: every barrier asks.

    Attributes:
        is_null: None is installed.
    """

    def __init__(self) -> None:
        self.install(NULL_TELEMETRY)

    def install(self, telemetry: Telemetry) -> None:
        """Have the methods of this telemetry from now on."""
        for name in _METHODS:
            setattr(self, name, getattr(telemetry, name))
        self.is_null = telemetry is NULL_TELEMETRY


# One a process, like OpenTelemetry's global tracer provider. Events and spans are a
# process's, not a store's: `configure` has to reach every store and barrier.
TELEMETRY: Final = InstalledTelemetry()


class Failures:
    """Counts failures of the telemetry, and reports the first one of each part.

    A part that failed rests for a minute: what made it fail may pass.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._counts: Counter[str] = Counter()
        # When each part failed that did since it was set up, by ``time.monotonic``.
        self._failed: dict[str, float] = {}
        # Names of torch that were reported as missing.
        self._missing: set[str] = set()
        # Failures that are not counted yet. Adding one is atomic and takes no lock: the
        # main thread adds some, and a signal handler may interrupt it.
        self._added: deque[tuple[str, BaseException]] = deque()
        self._lock = threading.RLock()

    def add(self, name: str, error: BaseException) -> None:
        """Count a failure of the named part; report it if it is the first one."""
        self._added.append((name, error))
        off_main_thread(self._count)

    def add_missing(self, name: str, attribute: str, consequence: str) -> None:
        """Report that this torch lacks a name that a part relies on, once per name.

        Args:
            name: The part of the telemetry.
            attribute: The name in torch.
            consequence: What does not work without it, as the end of a sentence.
        """
        if attribute in self._missing:
            return
        self._missing.add(attribute)
        missing = missing_from_torch(attribute, consequence)
        self.guarded(name, self._count_and_report, name, missing)

    def guarded(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an optional step; on failure count it and return None.

        A step of the main thread runs in a helper thread. What a signal handler raises
        meanwhile reaches the caller.
        """
        return off_main_thread(self._run, name, function, args, kwargs)

    def guarded_call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Make an optional call of a store; on failure count it and return None.

        For functions that do nothing else. They run in the thread of the caller: their
        calls are recorded as its own.
        """
        try:
            return function(*args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.add(name, error)
            return None

    def _run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.add(name, error)
            return None

    def _count(self) -> None:
        """Count what was added; report the first failure of each part."""
        while self._added:
            try:
                name, error = self._added.popleft()
            except IndexError:
                return  # another thread was quicker
            with self._lock:
                self._counts[name] += 1
                first = name not in self._failed
                self._failed[name] = time.monotonic()
            if first:
                self._report(name, error)

    def _count_and_report(self, name: str, error: BaseException) -> None:
        with self._lock:
            self._counts[name] += 1
        self._report(name, error)

    def counts(self) -> dict[str, int]:
        """Return the number of failures of each part that had one."""
        self._count()
        with self._lock:
            return dict(self._counts)

    def rests(self, name: str) -> bool:
        """Return whether the named part failed within the last minute."""
        failed = self._failed.get(name)
        return failed is not None and time.monotonic() - failed < REST

    def rearm(self) -> None:
        """Note that all parts are set up anew. Counts stay."""
        with self._lock:
            self._failed.clear()
            self._missing.clear()

    def _report(self, name: str, error: BaseException) -> None:
        try:
            self._telemetry.report_failure(name, error)
        except Exception as reporting_error:
            with suppress(Exception):
                NULL_TELEMETRY.report_failure(name, reporting_error)


def missing_from_torch(attribute: str, consequence: str) -> TracedStoreError:
    """Return the error for a name that the installed torch does not have."""
    version = getattr(sys.modules.get("torch"), "__version__", "")
    return TracedStoreError(f"torch {version} has no {attribute}: {consequence}")
