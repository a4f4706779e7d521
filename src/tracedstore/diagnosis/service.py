"""The diagnosis of this process: publishes its blocked calls, finds whom they wait for.

A thread does that, on connections of its own, so that nothing of it is on the path of a
call. It goes from store to store (`store_diagnosis`). A store may hang, and the thread
with it. Then another thread goes on with the other stores, and the one that hangs ends
when its store responds. `Diagnosis.check_stores` runs in the watcher: it starts that
other thread, and reports stores that do not respond.
"""

import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from tracedstore import names
from tracedstore.common import threads
from tracedstore.common.errors import TIMEOUT, error_type
from tracedstore.common.identity import process_identity
from tracedstore.common.signal_safety import calling_thread
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis.collective_notes import CollectiveNotes
from tracedstore.diagnosis.connection.connection_attempt import examine_server
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import (
    MIN_EXPLAINED_WAIT,
    blocked_calls,
    examine_after,
    is_barrier,
    waited_seconds,
    waits_for_end_of_job,
)
from tracedstore.diagnosis.observe.collectives import Collectives
from tracedstore.diagnosis.observe.movement import Movement
from tracedstore.diagnosis.observe.pending_collectives import (
    PendingCollective,
    PendingCollectives,
)
from tracedstore.diagnosis.observe.torch_groups import note_groups
from tracedstore.diagnosis.observe.waits import PAUSE, Pending, PendingCall, Waits
from tracedstore.diagnosis.rounds import Wait
from tracedstore.diagnosis.stall_action import EndProcess, StallAction
from tracedstore.diagnosis.store_diagnosis import (
    STORE_ERRORS,
    StoreDiagnoses,
    StoreDiagnosis,
    step_interval,
)
from tracedstore.local import facts
from tracedstore.recording.counters import ActiveCall, Call
from tracedstore.recording.recorder import Recorder

# Seconds that a call which timed out before a verdict was found waits for one: a share
# of its own duration, between these bounds. Calls shorter than a second get none.
_EXPLAIN_SHARE, _EXPLAIN_BOUNDS = 0.1, (0.5, 2.0)
# Seconds in one store after which another thread goes on with the others. Asking the
# processes of awaited ranks takes three.
_HAND_OVER_AFTER = 3.5
# Seconds without an answer after which a store does not respond.
_STEP_TIMEOUT: Final = 5.0
# A call that has timed out, and what its thread waits for; None if it does not.
_Request = tuple[PendingCall, threading.Event | None]
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
        self,
        recorder: Recorder,
        stall_after: float,
        *,
        answers: bool,
        collectives: bool = True,
        end_process: EndProcess | None = None,
    ) -> None:
        self._recorder = recorder
        self._watches_groups = collectives
        self._end_process = end_process
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
        after = self._stall_after if self._watches_groups else 0.0
        self._collectives = Collectives(after)
        self._pending = Waits(self._recorder, self._collectives.moved_at)
        self._pending_collectives = PendingCollectives(self._collectives)
        self._movement = Movement(self._collectives, self._stall_after)
        self._action = (
            None
            if self._end_process is None
            else StallAction(self._stall_after, self._still_seconds, self._end_process)
        )
        self._notes = CollectiveNotes(self._explain_collective)
        # By the identity of what is pending.
        self._waits: dict[Hashable, Wait] = {}
        # The identities of calls in flight that are no waits of a rank.
        self._background: frozenset[int] = frozenset()
        # Calls that have just timed out, with what their threads wait for.
        self._requests: list[_Request] = []
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
        if self._collectives.is_on:
            self._notes.install()

    def _start_instead_of(self, present: DaemonThread | None) -> None:
        if self._thread is not present:
            return
        facts.COLLECTIVES.answer = self._collectives.answer
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
        facts.COLLECTIVES.answer = None
        self._notes.remove()
        if thread is not None:
            thread.join(timeout)

    def covers(self, call: Call) -> bool | None:
        """Return whether a verdict covers a call; None if one is to be expected.

        A call in which no rank waits needs none.
        """
        if waits_for_end_of_job(self._recorder):
            return True
        wait = self._wait_of(call)
        if wait is None:
            return id(call) in self._background
        if wait.verdict is not None:
            return True
        return None if wait.store.expects_verdict(wait) else False

    def absent_key(self, call: Call) -> str:
        """Return a key that a call waits for, "" if none is known to be absent."""
        wait = self._wait_of(call)
        record = None if wait is None else wait.record
        return record.keys[0] if record is not None and record.keys else ""

    def _wait_of(self, call: Call) -> Wait | None:
        for wait in list(self._waits.values()):
            pending = wait.pending
            if isinstance(pending, PendingCall) and pending.active.call is call:
                return wait
        return None

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

    def _explain_collective(self, error: BaseException) -> None:
        """Add the verdict to the exception of a collective that has failed."""
        for wait in list(self._waits.values()):
            pending = wait.pending
            if not isinstance(pending, PendingCollective) or (
                pending.thread_id != calling_thread()
            ):
                continue
            wait.failed = pending.failed = True
            # A function that calls another one logs the same exception again.
            explained = any(
                note.startswith("tracedstore:")
                for note in getattr(error, "__notes__", ())
            )
            if wait.verdict is not None and not (wait.refuted or explained):
                error.add_note(f"tracedstore: {wait.verdict.describe()}")

    def _verdict_on(self, call: Call, error: BaseException | None) -> Verdict | None:
        wait = self._wait_of(call)
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
        return self._verdict_on_timeout(call, wait)

    def _verdict_on_timeout(self, call: Call, wait: Wait | None) -> Verdict | None:
        active = ActiveCall(*call, calling_thread(), call)
        pending = self._pending.of(active)
        if pending is None:
            return None  # no rank waited in it
        self._pending.timed_out(active)
        if wait is None or wait.verdict is None or wait.verdict.awaited_ranks:
            # Also with names: a rank may have arrived since.
            self._request(pending)
            wait = self._waits.get(pending.key)
        if wait is None or wait.verdict is None:
            return None
        wait.failed = True
        if wait.refuted:
            return None
        if wait.elected and not wait.reported:
            wait.store.report(wait)
        return wait.verdict

    def _request(self, pending: PendingCall) -> None:
        """Let the thread look at a call that has just timed out.

        The caller waits for that, unless the call was short. One that is repeated is
        seen by the thread so, however short it is.
        """
        if self._thread is None or is_barrier(pending.active):
            return
        waited = waited_seconds(self._recorder, pending.active)
        is_short = waited < MIN_EXPLAINED_WAIT
        if is_short and pending.repeated.waited() < self._examine_after(pending):
            return
        self._recorder.failures.guarded(names.DIAGNOSIS, self._hand_over)
        done = None if is_short else threading.Event()
        request = pending, done
        with self._changed:
            if is_short and self._requests:
                return
            self._requests.append(request)
            self._has_new_request = True
            self._changed.notify_all()
        if done is None:
            return
        shortest, longest = _EXPLAIN_BOUNDS
        done.wait(min(longest, max(shortest, _EXPLAIN_SHARE * waited)))
        # Its store hangs: nobody waits for this verdict any more.
        self._forget_request(request)

    def _examine_after(self, pending: Pending) -> float:
        return examine_after(pending.timeout, self._stall_after)

    def _forget_request(self, request: _Request) -> None:
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
        note_groups()
        stores = dict.fromkeys([*self._stores.registered(), *self._marked])
        stores |= dict.fromkeys(self._stores.unregistered())
        stores |= dict.fromkeys(wait.store for wait in list(self._waits.values()))
        # The first one is the wait of the rank.
        due: dict[StoreDiagnosis, Pending] = {}
        waits = self._pending.pending()
        for pending in waits:
            if pending.repeated.waited() >= self._examine_after(pending):
                store = self._stores.of_pending(pending)
                if store is not None:
                    due.setdefault(store, pending)
        self._add_collectives(due)
        of_ranks = {
            id(pending.active.call)
            for pending in waits
            if isinstance(pending, PendingCall)
        }
        self._background = frozenset(
            id(active.call)
            for active in blocked_calls(self._recorder)
            if id(active.call) not in of_ranks
            and self._stores.of(active.state, active.thread_id) is not None
        )
        requested: dict[StoreDiagnosis | None, list[_Request]] = {}
        for request in list(self._requests):
            store = self._stores.of_pending(request[0])
            requested.setdefault(store, []).append(request)
        for request in requested.pop(None, ()):  # of an unknown rank
            self._forget_request(request)
            if request[1] is not None:
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
                    due.get(store),
                    requested.get(store, ()),
                )
            finally:
                store.worker = None
            if self._thread not in (None, threading.current_thread()):
                return  # another thread goes on with the others

    def _add_collectives(self, due: dict[StoreDiagnosis, Pending]) -> None:
        """Add the collective that this rank waits in, if it waits in one."""
        store = self._stores.of_job()
        if store is None:
            return
        found = self._pending_collectives.pending(store.handle)
        self._movement.export()
        if not found:
            return
        pending = min(found, key=lambda one: (one.order, one.repeated.since))
        present = due.get(store)
        if present is None or pending.order < present.order:
            due[store] = pending

    def _work_in(
        self,
        store: StoreDiagnosis,
        due: Pending | None,
        requests: Sequence[_Request],
    ) -> None:
        """Take the next step in a store. Its errors are no failures of the telemetry.

        A server that has ended is reported by the calls that fail.
        """
        with suppress(*STORE_ERRORS):
            store.register()
        self._end_waits(store, due, {pending.key for pending, _ in requests})
        for request in requests:
            self._forget_request(request)
            pending, done = request
            with suppress(*STORE_ERRORS):
                try:
                    self._advance(store, pending, failed=True, at_once=done is not None)
                finally:
                    if done is not None:
                        done.set()
        with suppress(*STORE_ERRORS):
            if due is not None:
                self._advance(store, due, failed=False)
        with suppress(*STORE_ERRORS):
            store.withdraw_outlived()
            if store is self._stores.of_job():
                self._movement.publish(store.connection, store.member)
        if store.is_marked:
            self._marked.add(store)
        else:
            self._marked.discard(store)
        store.poll()

    def _advance(
        self,
        store: StoreDiagnosis,
        pending: Pending,
        *,
        failed: bool,
        at_once: bool = False,
    ) -> None:
        wait = self._wait_for(store, pending)
        wait.failed, wait.seen_ended = failed, False
        store.advance(wait, at_once=at_once)
        if self._action is not None:
            self._action.consider(store, wait)

    def _still_seconds(self) -> float:
        # The last Store call is noted for answers.
        knows = self._answers and self._collectives.is_on
        return self._movement.still_seconds() if knows else 0.0

    def _wait_for(self, store: StoreDiagnosis, pending: Pending) -> Wait:
        """Return the wait that is pending; a call that is repeated is the same one."""
        wait = self._waits.get(pending.key)
        if wait is not None and wait.store is not store:
            wait.store.end(self._waits.pop(pending.key), superseded=True)
            wait = None
        if wait is None:
            wait = Wait(pending, pending.repeated, store)
            wait = self._waits.setdefault(pending.key, wait)
        wait.pending, wait.repeated = pending, pending.repeated
        return wait

    def _end_waits(
        self, store: StoreDiagnosis, due: Pending | None, requested: set[Hashable]
    ) -> None:
        """End the waits of calls that are not in flight any more."""
        own = [key for key, wait in list(self._waits.items()) if wait.store is store]
        in_flight = {id(active.call) for active in blocked_calls(self._recorder)}
        for key in own:
            if key in requested or (due is not None and key == due.key):
                continue
            wait = self._waits[key]
            pending = wait.pending
            wait.failed = wait.failed or (pending is not None and pending.failed)
            if (
                isinstance(pending, PendingCall)
                and id(pending.active.call) in in_flight
            ):
                if wait.record is not None:
                    # Another wait is that of the rank now, or none is.
                    store.end(self._waits.pop(key), superseded=True)
            elif wait.failed and _may_be_repeated(wait):
                store.pause(wait)
            # A call is not in flight any more before it is known that it has failed.
            elif wait.record is not None and not (wait.failed or wait.seen_ended):
                wait.seen_ended = True
            else:
                store.end(self._waits.pop(key))
                self._pending.forget(key)

    # In the watcher.

    def check_stores(self) -> bool:
        """Report stores that do not respond; let another thread see to the others.

        Returns whether blocked calls have no verdict yet.
        """
        self._hand_over()
        due = [
            pending
            for pending in self._pending.calls()
            if pending.repeated.waited() >= self._stall_after
        ]
        for pending in due:
            store = self._stores.of_pending(pending)
            if store is not None and store.is_busy_for(_STEP_TIMEOUT):
                self._report_server(pending, store)
        return any(not self.covers(pending.active.call) for pending in due)

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

    def _report_server(self, pending: PendingCall, store: StoreDiagnosis) -> None:
        wait = self._wait_for(store, pending)
        if wait.verdict is not None:
            return
        verdict = examine_server(pending.active.call, None)
        if verdict is None:
            return
        rank = process_identity().rank
        wait.verdict = replace(
            verdict,
            waiting_ranks=() if rank is None else (rank,),
            waited_seconds=wait.repeated.waited(),
        )
        # The store does not respond, so the ranks cannot agree on one.
        what = f"{pending.state.identity.server}/{verdict.cause}"
        if stall_reports.keep_claim(what):
            wait.claimed = what
            stall_reports.report(wait, wait.verdict, pending.state.identity.url)


def _may_be_repeated(wait: Wait) -> bool:
    """Return whether a call that has failed has timed out a moment ago."""
    ended_at = wait.repeated.ended_at
    return ended_at is not None and time.monotonic() < ended_at + PAUSE
