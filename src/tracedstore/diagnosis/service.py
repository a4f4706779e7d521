"""The diagnosis of this process: publishes its blocked calls, finds whom they wait for.

A thread does that, on connections of its own, so that nothing of it is on the path of a
call. It goes from store to store (`store_diagnosis`). A store may hang, and the thread
with it. Then another thread goes on with the other stores, and the one that hangs ends
when its store responds. `Diagnosis.check_stores` runs in the watcher: it starts that
other thread, and reports stores that do not respond.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from tracedstore import names
from tracedstore.common import threads
from tracedstore.common.errors import TIMEOUT, error_type
from tracedstore.common.identity import process_identity
from tracedstore.common.signal_safety import calling_thread
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis.connection.connection_attempt import examine_server
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import (
    blocked_calls,
    examine_after,
    is_barrier,
    waited_seconds,
)
from tracedstore.diagnosis.store_diagnosis import (
    STORE_ERRORS,
    StoreDiagnoses,
    StoreDiagnosis,
    Wait,
    step_interval,
)
from tracedstore.recording.counters import ActiveCall, Call
from tracedstore.recording.recorder import Recorder

# Seconds that a call which timed out before a verdict was found waits for one: a share
# of its own duration, between these bounds. Shorter calls than the minimum get none.
_EXPLAIN_SHARE, _EXPLAIN_BOUNDS = 0.1, (0.5, 2.0)
_MIN_EXPLAINED_WAIT = 1.0
# Seconds in one store after which another thread goes on with the others. Asking the
# processes of awaited ranks takes three.
_HAND_OVER_AFTER = 3.5
# Seconds without an answer after which a store does not respond.
_STEP_TIMEOUT: Final = 5.0
_EXPLAINED: Final = ("awaited", "awaited_ranks", "cause", "phase")


def _with_earlier(verdict: Verdict | None, wait: Wait | None) -> Verdict | None:
    """Add what the call waited for until then to a verdict on its server.

    A rank that gives up first may take the server with it.
    """
    if verdict is None or wait is None or wait.verdict is None:
        return verdict
    earlier = f"before that {wait.verdict.describe_awaited()} was awaited"
    return replace(verdict, evidence=(*verdict.evidence, earlier))


class Diagnosis:
    """Finds whom the blocked calls of this process wait for."""

    def __init__(
        self, recorder: Recorder, stall_after: float, *, answers: bool
    ) -> None:
        self._recorder = recorder
        self._stall_after = stall_after
        self._answers = answers
        self._interval = step_interval(stall_after)
        self.reset()

    def reset(self) -> None:
        """Forget the parent's thread and calls, as a forked child must."""
        self._changed = threading.Condition()
        self._thread: DaemonThread | None = None
        # The store that it is in, or was in last.
        self._visited: StoreDiagnosis | None = None
        # By the identity of the call.
        self._waits: dict[int, Wait] = {}
        # Calls that have just timed out, and whose threads wait for a verdict.
        self._requests: list[tuple[ActiveCall, threading.Event]] = []
        self._has_new_request = False
        self._stores = StoreDiagnoses(
            self._recorder, self._stall_after, answers=self._answers
        )
        # With the record of a failed call. Their stores may have been freed.
        self._marked: set[StoreDiagnosis] = set()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, or is not to run."""
        return self._thread is not None or not self._stall_after

    def start(self) -> None:
        """Start the thread, unless it runs.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._changed:
            if self._stall_after:
                self._start_instead_of(None)

    def _start_instead_of(self, present: DaemonThread | None) -> None:
        if self._thread is not present:
            return
        # Set before it starts, because it ends when it finds another one here.
        self._thread = DaemonThread(self._run, name="tracedstore-diagnosis")
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = present
            raise

    def stop(self, timeout: float) -> None:
        """End the thread; wait for that within the timeout."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout)

    def covers(self, call: Call) -> bool | None:
        """Return whether a verdict covers a call; None if one is to be expected."""
        wait = self._waits.get(id(call))
        if wait is None or wait.verdict is not None:
            return wait is not None
        return None if wait.store.expects_verdict(wait) else False

    def explain(self, call: Call, error: BaseException | None) -> Mapping[str, Any]:
        """Return what is known about a call that ended, as event fields.

        The exception gets it as a note. Runs in the thread that made the call. If that
        timed out, it waits until a verdict is found or checked again, 2 s at most.
        """
        verdict = self._verdict_on(call, error)
        if verdict is None:
            return {}
        if error is not None:
            error.add_note(f"tracedstore: {verdict.describe()}")
        fields = verdict.event_fields()
        return {name: fields[name] for name in _EXPLAINED}

    def _verdict_on(self, call: Call, error: BaseException | None) -> Verdict | None:
        wait = self._waits.get(id(call))
        if error is None:
            if wait is None or wait.verdict is None:
                return None
            # Not left to the thread: the process may end now.
            wait.store.resumed(wait)
            return wait.verdict
        if wait is not None:
            wait.failed = True
        if error_type(error) != TIMEOUT:
            return _with_earlier(examine_server(call, error), wait)
        if wait is None or wait.verdict is None or wait.verdict.awaited_ranks:
            # Also with names: a rank may have arrived since.
            self._request(ActiveCall(*call, calling_thread(), call))
            wait = self._waits.get(id(call))
        if wait is None or wait.verdict is None:
            return None
        wait.failed = True
        if wait.refuted:
            return None
        if wait.elected and not wait.reported:
            wait.store.report(wait)
        return wait.verdict

    def _request(self, active: ActiveCall) -> None:
        """Let the thread look at a call that has just timed out, and wait for that."""
        waited = waited_seconds(self._recorder, active)
        if self._thread is None or waited < _MIN_EXPLAINED_WAIT or is_barrier(active):
            return
        self._recorder.failures.guarded(names.DIAGNOSIS, self._hand_over)
        request = active, threading.Event()
        with self._changed:
            self._requests.append(request)
            self._has_new_request = True
            self._changed.notify_all()
        shortest, longest = _EXPLAIN_BOUNDS
        request[1].wait(min(longest, max(shortest, _EXPLAIN_SHARE * waited)))
        # Its store hangs: nobody waits for this verdict any more.
        self._forget_request(request)

    def _forget_request(self, request: tuple[ActiveCall, threading.Event]) -> None:
        with self._changed, suppress(ValueError):
            self._requests.remove(request)

    # The thread.

    def _run(self) -> None:
        # Its calls are the telemetry's own.
        try:
            with self._recorder.unrecorded():
                while self._is_current():
                    self._recorder.failures.guarded(names.DIAGNOSIS, self.visit_stores)
                    self._pause()
        finally:
            thread = threading.current_thread()
            if isinstance(thread, DaemonThread):
                threads.forget(thread)

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_new_request or not self._is_current(), self._interval
            )
            self._has_new_request = False

    def _is_current(self) -> bool:
        """Return whether this thread goes on: another one may have taken over."""
        return self._thread is threading.current_thread()

    def visit_stores(self) -> None:
        """Take the next step in each store in which there is something to do."""
        stores = dict.fromkeys([*self._stores.registered(), *self._marked])
        stores |= dict.fromkeys(wait.store for wait in list(self._waits.values()))
        due: dict[StoreDiagnosis, list[ActiveCall]] = {}
        for active in blocked_calls(self._recorder):
            waited = waited_seconds(self._recorder, active)
            if waited >= examine_after(active, self._stall_after):
                store = self._stores.of(active)
                if store is not None:
                    due.setdefault(store, []).append(active)
        requested: dict[StoreDiagnosis | None, list[tuple[ActiveCall, Any]]] = {}
        for request in list(self._requests):
            requested.setdefault(self._stores.of(request[0]), []).append(request)
        for request in requested.pop(None, ()):  # of an unknown rank
            self._forget_request(request)
            request[1].set()
        # The stores of calls that wait come first.
        for store in dict.fromkeys([*requested, *due, *stores]):
            if store is None or store.worker is not None:
                continue  # another thread hangs in it
            self._visited = store
            store.busy_since = time.monotonic()
            store.worker = threading.get_ident()
            try:
                self._recorder.failures.guarded(
                    names.DIAGNOSIS,
                    self._work_in,
                    store,
                    due.get(store, ()),
                    requested.get(store, ()),
                )
            finally:
                store.worker = None
            if self._thread not in (None, threading.current_thread()):
                return  # another thread goes on with the others

    def _work_in(
        self,
        store: StoreDiagnosis,
        due: Sequence[ActiveCall],
        requests: Sequence[tuple[ActiveCall, threading.Event]],
    ) -> None:
        """Take the next step in a store. Its errors are no failures of the telemetry.

        A server that has ended is reported by the calls that fail.
        """
        self._end_waits(store, {id(active.call) for active, _ in requests})
        for request in requests:
            self._forget_request(request)
            active, done = request
            with suppress(*STORE_ERRORS):
                try:
                    self._advance(store, active, at_once=True)
                finally:
                    done.set()
        with suppress(*STORE_ERRORS):
            for active in due:
                self._advance(store, active)
        with suppress(*STORE_ERRORS):
            store.withdraw_outlived()
        if store.is_marked:
            self._marked.add(store)
        else:
            self._marked.discard(store)
        store.poll()

    def _advance(
        self, store: StoreDiagnosis, active: ActiveCall, *, at_once: bool = False
    ) -> None:
        wait = self._waits.setdefault(id(active.call), Wait(active, store))
        waited = waited_seconds(self._recorder, active)
        store.advance(wait, waited, at_once=at_once)

    def _end_waits(self, store: StoreDiagnosis, requested: set[int]) -> None:
        """End the waits of calls that are not in flight any more."""
        own = [key for key, wait in list(self._waits.items()) if wait.store is store]
        in_flight = {id(active.call) for active in blocked_calls(self._recorder)}
        for key in own:
            wait = self._waits[key]
            if key in in_flight or key in requested:
                continue
            # A call is not in flight any more before it is known that it has failed.
            if wait.record is not None and not (wait.failed or wait.seen_ended):
                wait.seen_ended = True
            else:
                store.end(self._waits.pop(key))

    # In the watcher.

    def check_stores(self) -> bool:
        """Report stores that do not respond; let another thread see to the others.

        Returns whether blocked calls have no verdict yet.
        """
        self._hand_over()
        due = [
            active
            for active in blocked_calls(self._recorder)
            if waited_seconds(self._recorder, active) >= self._stall_after
        ]
        for active in due:
            store = self._stores.of(active)
            if store is not None and store.is_busy_for(_STEP_TIMEOUT):
                self._report_server(active, store)
        return any(not self.covers(active.call) for active in due)

    def _hand_over(self) -> None:
        """Start another thread if the present one hangs in a store."""
        thread, store = self._thread, self._visited
        if thread is None or store is None or store.worker != thread.ident:
            return
        if store.is_busy_for(_HAND_OVER_AFTER):
            # It ends as soon as its store responds, or the process does.
            threads.track(thread)
            with self._changed:
                self._start_instead_of(thread)

    def _report_server(self, active: ActiveCall, store: StoreDiagnosis) -> None:
        wait = self._waits.setdefault(id(active.call), Wait(active, store))
        if wait.verdict is not None:
            return
        verdict = examine_server(active.call, None)
        if verdict is None:
            return
        rank = process_identity().rank
        wait.verdict = replace(
            verdict,
            waiting_ranks=() if rank is None else (rank,),
            waited_seconds=waited_seconds(self._recorder, active),
        )
        # The store does not respond, so the ranks cannot agree on one.
        what = f"{active.state.identity.server}/{verdict.cause}"
        if stall_reports.keep_claim(what):
            wait.claimed = what
            stall_reports.report(wait, wait.verdict)
