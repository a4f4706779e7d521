"""Who is told of a call, and what happens when the telling fails.

An observer that raises is removed, counted and reported once: telemetry may fail,
the job may not fail of it. Observers are told in order and know nothing of each
other.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from tracedstore.core.operation import Operation

# Where a failure is reported when the ordinary way of reporting is what failed.
_last_resort = logging.getLogger("tracedstore")


class Observer(Protocol):
    """Is told of finished calls, in the thread that made them."""

    name: str

    def observe(self, operation: Operation) -> None:
        """Take note of one call; must be quick and must not call the store."""


class Failures:
    """The telemetry that broke: switched off, counted, reported once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.report: Callable[[str, BaseException], None] | None = None

    def add(self, name: str, error: BaseException) -> None:
        """Count a failure of the named part, and report the first one of it."""
        with self._lock:
            self._counts[name] += 1
            first = self._counts[name] == 1
        if first:
            self._tell(name, error)

    def guarded(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Do something that the job can do without; None where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.add(name, error)
            return None

    def counts(self) -> dict[str, int]:
        """Give the number of failures of each part that had one."""
        with self._lock:
            return dict(self._counts)

    def has(self, name: str) -> bool:
        """Tell whether the named part failed and is therefore off."""
        return name in self._counts

    def reset(self, name: str | None = None) -> None:
        """Let a part that is set up anew start clean; without a name, all of them."""
        self._lock = threading.Lock()  # a fork may have copied it locked
        if name is None:
            self._counts.clear()
        else:
            self._counts.pop(name, None)

    def _tell(self, name: str, error: BaseException) -> None:
        try:
            if self.report is not None:
                self.report(name, error)
                return
        except Exception as reporting_error:
            error = reporting_error
        with suppress(Exception):  # nobody is left to tell
            _last_resort.error(
                "telemetry.disabled: %s raised %r and is switched off; "
                "the job is not affected",
                name,
                error,
            )


class Observers:
    """The observers of a process, in the order in which they are told."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._observers: tuple[Observer, ...] = ()

    def set(self, observers: Iterable[Observer]) -> None:
        """Replace all of them."""
        self._observers = tuple(observers)

    def tell(self, operation: Operation) -> None:
        """Tell every observer; one that raises is told nothing from then on."""
        for observer in self._observers:
            try:
                observer.observe(operation)
            except Exception as error:
                self._observers = tuple(o for o in self._observers if o is not observer)
                self._failures.add(observer.name, error)
