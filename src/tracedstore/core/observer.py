"""Observers of finished calls, and what happens when telemetry fails.

An observer that raises is removed, counted and reported once. Telemetry may fail; the
job must not. Observers run in order and do not know each other.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from tracedstore.core.errors import TracedStoreError
from tracedstore.core.operation import Operation
from tracedstore.core.telemetry import NULL_TELEMETRY, Telemetry


class Observer(Protocol):
    """Observes finished calls, in the thread that made them."""

    name: str

    def observe(self, operation: Operation) -> None:
        """Observe one call; must be quick and must not call the store."""


class Failures:
    """Counts failures of the telemetry, and reports the first one of each part."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._counts: Counter[str] = Counter()
        # Parts that failed since they were set up.
        self._failed: set[str] = set()
        # Names of torch that were reported as missing.
        self._missing: set[str] = set()
        self._lock = threading.Lock()

    def add(self, name: str, error: BaseException) -> None:
        """Count a failure of the named part; report it if it is the first one."""
        with self._lock:
            self._counts[name] += 1
            first = name not in self._failed
            self._failed.add(name)
        if first:
            self._report(name, error)

    def add_missing(self, name: str, attribute: str, consequence: str) -> None:
        """Report that this torch lacks a name that a part relies on, once per name.

        Args:
            name: The part of the telemetry.
            attribute: The name in torch.
            consequence: What does not work without it, as the end of a sentence.
        """
        with self._lock:
            if attribute in self._missing:
                return
            self._missing.add(attribute)
            self._counts[name] += 1
        self._report(name, missing_from_torch(attribute, consequence))

    def guarded(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an optional step; on failure count it and return None."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.add(name, error)
            return None

    def counts(self) -> dict[str, int]:
        """Return the number of failures of each part that had one."""
        with self._lock:
            return dict(self._counts)

    def has(self, name: str) -> bool:
        """Return whether the named part failed since it was set up."""
        return name in self._failed

    def rearm(self) -> None:
        """Note that all parts are set up anew. Counts stay."""
        with self._lock:
            self._failed.clear()
            self._missing.clear()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._lock = threading.Lock()  # a fork may have copied it locked
        self._counts.clear()
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

    def set(self, observers: Iterable[Observer]) -> None:
        """Replace all observers."""
        self._observers = tuple(observers)

    def notify(self, operation: Operation) -> None:
        """Let every observer observe a call; remove one that raises."""
        for observer in self._observers:
            try:
                observer.observe(operation)
            except Exception as error:
                self._observers = tuple(o for o in self._observers if o is not observer)
                self._failures.add(observer.name, error)
