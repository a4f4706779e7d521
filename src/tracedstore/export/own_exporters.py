"""The exporters that this package sets up: what they deliver, and one line if not.

The SDK's exporters log each attempt, in every process of a job. A collector that is
down would fill the log of the job with that. So what these exporters log, while they
export for this package, is the reason in one event when they begin to fail; another one
says when that has ended. Exporters of the application are left alone.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from tracedstore import names
from tracedstore.common.identity import process_identity
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.signals.spans import process_attributes

_logger = logging.getLogger(names.SCOPE)
_MAX_TEXT = 256

# What an exporter logs in this context; None where it may log.
_logged: ContextVar[list[str] | None] = ContextVar("logged", default=None)


class _Withheld(logging.Filter):
    """Withholds what is logged while `_logged` takes it."""

    def filter(self, record: logging.LogRecord) -> bool:
        taken = _logged.get()
        if taken is None:
            return True
        taken.append(record.getMessage())
        return False


_WITHHELD: Final = _Withheld()


def own_resource() -> Resource:
    """Return the resource of this process, which no other process has.

    The variables of OpenTelemetry come first; the SDK before 1.45 knows no instance.
    """
    identity = process_identity()
    attributes = process_attributes(identity)
    if SERVICE_INSTANCE_ID not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes[SERVICE_INSTANCE_ID] = f"{identity.host}:{os.getpid()}"
    return Resource.create(attributes)


class Exports:
    """The exports of one signal.

    Args:
        signal: Spans, metrics or logs.
        exporter: What exports them.
        loses: What one export could not deliver is not in the next one.
    """

    def __init__(self, signal: str, exporter: Any, *, loses: bool = True) -> None:
        self._signal = signal
        self._loses = loses
        self._failing_since: float | None = None
        self._failures = 0
        for part in type(exporter).__mro__:
            logger = getattr(sys.modules.get(part.__module__), "_logger", None)
            if isinstance(logger, logging.Logger):
                logger.addFilter(_WITHHELD)
        # A zero, which is not the same as no exporter.
        RECORDER.cold.record((names.EXPORTS, (signal, "ok"), None))
        self.drop(0)

    def run(self, export: Callable[[], Any], items: int = 0) -> Any:
        """Export so many items, and return the result; None if it raised."""
        logged: list[str] = []
        token = _logged.set(logged)
        result = None
        try:
            result = export()
        except Exception as error:
            logged.append(f"{type(error).__name__}: {error}")
        finally:
            _logged.reset(token)
        succeeded = getattr(result, "name", "") == "SUCCESS"
        outcome = "ok" if succeeded else "failed"
        RECORDER.cold.record((names.EXPORTS, (self._signal, outcome), 1))
        if succeeded:
            self._succeeded()
        else:
            self.drop(items)
            self._failed(logged[-1] if logged else "no reason was logged")
        return result

    def drop(self, items: int) -> None:
        """Count items that nothing delivers any more."""
        if self._loses:
            RECORDER.cold.record((names.EXPORT_DROPPED, (self._signal,), items))

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self._emit(names.EXPORT_FAILED, error=" ".join(reason.split())[:_MAX_TEXT])

    def _succeeded(self) -> None:
        since, failures = self._failing_since, self._failures
        self._failing_since, self._failures = None, 0
        if since is not None:
            seconds = round(time.monotonic() - since, 3)
            self._emit(
                names.EXPORT_RESUMED, failed_seconds=seconds, failed_exports=failures
            )

    def _emit(self, event: str, **fields: Any) -> None:
        # The last exports of a process come after the last event.
        if TELEMETRY.is_null:
            level = logging.getLevelNamesMapping()[names.EVENT_LEVELS[event].upper()]
            _logger.log(level, "%s: %s %s", event, self._signal, fields)
            return
        RECORDER.failures.guarded(
            names.EVENTS, TELEMETRY.emit, event, signal=self._signal, **fields
        )


class OwnExporter:
    """An exporter of spans or log records that is watched."""

    def __init__(self, signal: str, exporter: Any) -> None:
        self.exports = Exports(signal, exporter)
        self._exporter = exporter
        # Items that exports have begun with.
        self.taken = 0

    def export(self, batch: Any) -> Any:
        """Export a batch."""
        self.taken += len(batch)
        return self.exports.run(partial(self._exporter.export, batch), len(batch))

    def shutdown(self) -> None:
        """End the exporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter."""
        return bool(self._exporter.force_flush(timeout_millis))
