"""Observers of finished calls, and what happens when telemetry fails.

An observer that raises is counted and reported once, and gets no call for a minute.
Telemetry may fail; the job must not. Observers run in order and do not know each other.
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

from tracedstore import names
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.recording.operation import Operation
from tracedstore.recording.telemetry import NULL_TELEMETRY, Telemetry

# Seconds that a part of the telemetry rests after a failure.
REST: Final = 60.0


class Observer(Protocol):
    """Observes finished calls, with the context variables of their callers.

    Calls of the main thread are observed in a helper thread, the others in the thread
    that made them. The caller waits.
    """

    name: str

    def observe(self, operation: Operation) -> None:
        """Observe one call; must be quick and must not call the store."""


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


class Observers:
    """The observers of a process, in order."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._observers: tuple[Observer, ...] = ()
        # Until when an observer that raised gets nothing, by its identity.
        self._resting: dict[int, float] = {}

    def set(self, observers: Iterable[Observer]) -> None:
        """Replace all observers."""
        self._observers = tuple(observers)
        self._resting = {}

    def notify(self, operation: Operation) -> None:
        """Let every observer observe a call, but for those that raised lately."""
        for observer in self._observers:
            rests_until = self._resting.get(id(observer))
            if rests_until is not None and time.monotonic() < rests_until:
                continue
            try:
                observer.observe(operation)
            except Exception as error:
                self._resting[id(observer)] = time.monotonic() + REST
                self._failures.add(_part_of(observer), error)


def _part_of(observer: Observer) -> str:
    """Return the part of the telemetry that failures of an observer are counted for."""
    is_ours = type(observer).__module__.startswith(f"{__package__.partition('.')[0]}.")
    # An observer of the application may have the name of one of our parts, which must
    # not rest because of it.
    if observer.name in names.OBSERVERS and not is_ours:
        return f"{names.APPLICATION_PREFIX}{observer.name}"
    return observer.name
