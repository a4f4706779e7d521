"""Watches the Store calls in flight: reports them, and finds whom they wait for."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from tracedstore import names
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.local.facts import KEY_WRITERS, LAST_CALL
from tracedstore.recording.counters import Call
from tracedstore.recording.observer import Observer
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import Telemetry
from tracedstore.recording.watcher import WATCHER, Watch
from tracedstore.signals.inflight import StallReporter

# Seconds between two looks while a store does not respond.
_HANG_INTERVAL = 1.0
# Seconds between two attempts to start threads.
_START_INTERVAL = 10.0


class StallWatch:
    """The stall reports and the diagnosis of a process.

    Args:
        telemetry: What they are emitted through.
        stall_after: Seconds after which a call is stalled; 0 for never.
        answers: This process answers questions about what it does.

    Attributes:
        observers: What has to observe notable calls, so that questions can be answered.
    """

    def __init__(
        self, telemetry: Telemetry, stall_after: float, *, answers: bool
    ) -> None:
        self._after = stall_after
        self._diagnosis = Diagnosis(RECORDER, stall_after, answers=answers)
        self._reporter = StallReporter(
            RECORDER, telemetry, stall_after, self._diagnosis.covers
        )
        self._watch: Watch | None = None
        # When to look next whether the threads run, by ``time.monotonic``.
        self._start_at = 0.0
        self._lock = threading.RLock()
        self.observers: tuple[Observer, ...] = (
            (KEY_WRITERS, LAST_CALL) if answers else ()
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

    def _report(self) -> float:
        RECORDER.resume_recording()
        hangs = RECORDER.failures.guarded(names.DIAGNOSIS, self._diagnosis.check_store)
        delay = self._reporter.report()
        return min(delay, _HANG_INTERVAL) if hangs else delay
