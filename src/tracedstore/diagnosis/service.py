"""The diagnosis of this process: publishes its blocked calls, finds whom they wait for.

One thread does all of it, on connections of its own, so that nothing of it is on the
path of a call. It may hang with its store. `Diagnosis.check_store` runs in the watcher
and reports that.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tracedstore import names
from tracedstore.common import election
from tracedstore.common.errors import TIMEOUT, error_type
from tracedstore.common.identity import process_identity
from tracedstore.common.signal_safety import calling_thread
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis.ask.questions import MAX_POLLING_RANKS
from tracedstore.diagnosis.connection.connection_attempt import examine_server
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.inquiry import inquire, still_holds
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_calls import is_barrier
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.diagnosis.observe.blocked_waits import (
    Repeats,
    Wait,
    answer_timeout,
    blocked_calls,
    examine_after,
    waited_seconds,
)
from tracedstore.diagnosis.session import (
    STORE_ERRORS,
    Session,
    Sessions,
)
from tracedstore.recording.counters import ActiveCall, Call
from tracedstore.recording.recorder import Recorder

# Seconds between two looks at the calls in flight.
_INTERVAL = 1.0
# Seconds from publishing a record to looking: the records of the other ranks arrive.
_SETTLE = 1.5
# Seconds from the begin of a round in which a suspect that is in a Store call may
# publish its record: on a busy machine that takes longer than `_SETTLE`.
_RECORDS_TIMEOUT = 4.0
# Seconds after which further ranks look, because those that did have published nothing.
_VERDICT_TIMEOUT = 6.0
# Seconds that a call which timed out before a verdict was found waits for one: a share
# of its own duration, between these bounds. Shorter calls than the minimum get none.
_EXPLAIN_SHARE, _EXPLAIN_BOUNDS = 0.1, (0.5, 2.0)
_MIN_EXPLAINED_WAIT = 1.0
# Seconds for processes to answer while a call waits for the verdict.
_ANSWER_TIMEOUT_AT_ONCE = 0.2
# Seconds after which a step of the thread means that its store does not respond.
_STEP_TIMEOUT = 5.0
_EXPLAINED = ("awaited", "awaited_ranks", "cause", "phase")
# Ranks up to which each reads the store once in an interval; with more, less often.
_RANKS_PER_INTERVAL = 2048


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
        self._interval = min(_INTERVAL, stall_after / 4)
        self._settle = min(_SETTLE, stall_after / 2)
        self.reset()

    def reset(self) -> None:
        """Forget the parent's thread and calls, as a forked child must."""
        self._changed = threading.Condition()
        self._thread: DaemonThread | None = None
        self._stopping = False
        self._busy_since: float | None = None
        self._waits: dict[int, Wait] = {}
        self._repeats = Repeats()
        self._requests: list[tuple[ActiveCall, threading.Event]] = []
        self._sessions = Sessions(answers=self._answers)

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
            if self._thread is not None or not self._stall_after:
                return
            self._stopping = False
            thread = DaemonThread(self._run, name="tracedstore-diagnosis")
            thread.start()
            self._thread = thread

    def stop(self, timeout: float) -> None:
        """End the thread; wait for that within the timeout."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout)

    def covers(self, call: Call) -> bool | None:
        """Return whether a verdict covers a call; None if one is to be expected."""
        wait = self._waits.get(id(call))
        if wait is None or wait.verdict is not None:
            return wait is not None
        # Ranks of a large job read the verdict less often.
        late = _VERDICT_TIMEOUT + 2 * (wait.interval - self._interval)
        expected = wait.record is not None and wait.looking() < late
        return None if expected else False

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
            self._resumed(wait, wait.verdict)
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
            self._emit(wait, wait.verdict)
        return wait.verdict

    def _request(self, active: ActiveCall) -> None:
        """Let the thread look at a call that has just timed out, and wait for that."""
        waited = waited_seconds(self._recorder, active)
        if self._thread is None or waited < _MIN_EXPLAINED_WAIT or is_barrier(active):
            return
        done = threading.Event()
        with self._changed:
            self._requests.append((active, done))
            self._changed.notify_all()
        shortest, longest = _EXPLAIN_BOUNDS
        done.wait(min(longest, max(shortest, _EXPLAIN_SHARE * waited)))

    def _run(self) -> None:
        # Its calls are the telemetry's own.
        with self._recorder.unrecorded():
            while not self._stopping:
                self._busy_since = time.monotonic()
                self._recorder.failures.guarded(names.DIAGNOSIS, self._try_step)
                self._busy_since = None
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopping or self._requests, self._interval
                    )

    def _try_step(self) -> None:
        # A server that has ended is reported by the calls that fail.
        with suppress(*STORE_ERRORS):
            self._step()

    def _step(self) -> None:
        calls = {id(active.call): active for active in blocked_calls(self._recorder)}
        with self._changed:
            requests, self._requests = self._requests, []
        requested = {id(active.call) for active, _ in requests}
        for key in self._waits.keys() - calls.keys() - requested:
            wait = self._waits[key]
            # A call is not in flight any more before it is known that it has failed.
            if wait.record is not None and not (wait.failed or wait.seen_ended):
                wait.seen_ended = True
            else:
                self._end(self._waits.pop(key))
        for active in calls.values():
            waited = waited_seconds(self._recorder, active)
            if waited >= examine_after(active, self._stall_after):
                self._advance(active, waited)
        for active, done in requests:
            try:
                waited = waited_seconds(self._recorder, active)
                self._advance(active, waited, at_once=True)
            finally:
                done.set()
        self._sessions.poll()

    def _advance(
        self, active: ActiveCall, waited: float, *, at_once: bool = False
    ) -> None:
        """Take the next step towards a verdict on a call."""
        session = self._sessions.of(active)
        if session is None:
            return
        wait = self._waits.setdefault(id(active.call), Wait(active))
        now = time.monotonic()
        if not wait.current and (now >= wait.refresh_at or at_once):
            wait.interval = self._interval_of(session)
            self._publish(session, wait, waited, now)
            wait.refresh_at = now + wait.interval
        elif now >= wait.look_at and wait.reported:
            wait.begin_round(election.REPORTERS)
        if at_once and wait.record is not None:
            # First: when the caller has the exception, the process may end.
            self._sessions.end(active, wait.record, failed=True)
        if wait.record is None or (now < wait.look_at and not at_once):
            return
        if at_once and wait.current and not self._holds(session, wait, wait.verdict):
            wait.discard_verdict()
        if not wait.current:
            self._look(session, wait, now, waited, at_once=at_once)
        # A call that has timed out is reported by the thread that made it.
        if wait.current and waited >= self._stall_after and not at_once:
            # The next round is when the wait has doubled.
            wait.look_at = now + waited
            wait.reported = True
            if wait.elected:
                self._report(session, wait)

    def _interval_of(self, session: Session) -> float:
        """Return the seconds between two looks of a rank that does not look itself."""
        ranks = session.member.world_size
        return self._interval * max(1.0, ranks / _RANKS_PER_INTERVAL)

    def _publish(self, session: Session, wait: Wait, waited: float, now: float) -> None:
        before = wait.record
        started = time.time() - waited if before is None else before.started
        record = session.describe(wait.active, started)
        if record == before:
            return
        wait.record = record
        if record is None:
            # The keys exist now: the call returns.
            session.withdraw()
            return
        session.publish(record)
        if before is None:
            wait.look_at = now + self._settle
            wait.round_started = time.time()

    def _look(
        self, session: Session, wait: Wait, now: float, waited: float, *, at_once: bool
    ) -> None:
        """Read the verdict of another rank, or find one if this rank is elected."""
        record = wait.record
        if record is None:
            return
        # Ranks look at different times: a verdict holds until the wait nearly doubled.
        since = time.time() - max(self._settle, waited / 2)
        since = max(since, record.started, wait.valid_from)
        published = session.read_verdict(record, since)
        # Any client can write one. In a large job all ranks would read all records.
        large = session.member.world_size > MAX_POLLING_RANKS
        if published and (large or self._holds(session, wait, published)):
            wait.accept(published)
            wait.elected = False  # the process that found it reports it
            return
        # The records of ten thousand ranks take seconds to read.
        late = (_VERDICT_TIMEOUT + wait.interval) * wait.allowed / election.REPORTERS
        if not wait.order:
            wait.order = session.take_order()
        elif wait.looking() > late:
            wait.allowed += election.REPORTERS
        wait.elected = election.is_elected(wait.order, wait.allowed)
        if not (wait.elected or at_once):
            wait.look_at = now + wait.interval
            return
        timeout = _ANSWER_TIMEOUT_AT_ONCE if at_once else answer_timeout(wait.active)
        verdict = inquire(
            session.connection,
            session.member,
            timeout,
            call_connection=session.connection_to(wait.active.state),
            describe=partial(self._describe, session, wait, record.started),
            records_until=wait.round_started + _RECORDS_TIMEOUT,
        )
        if verdict is None:
            wait.look_at = now + self._interval
        else:
            wait.accept(verdict)
            session.publish_verdict(verdict)

    def _describe(
        self, session: Session, wait: Wait, started: float
    ) -> BlockedRecord | None:
        """Return what a call waits for now, all of it.

        It is progress: a store that is slow, but responds, is not reported.
        """
        self._busy_since = time.monotonic()
        record = session.describe(wait.active, started, complete=True)
        self._busy_since = time.monotonic()
        return record

    def _report(self, session: Session, wait: Wait) -> None:
        if wait.verdict is not None and self._holds(session, wait, wait.verdict):
            self._emit(wait, wait.verdict)
        else:
            wait.discard_verdict()

    def _holds(self, session: Session, wait: Wait, verdict: Verdict | None) -> bool:
        """Return whether all ranks that a verdict names are awaited now.

        All ranks do this when their calls time out, so only these ranks are checked.
        """
        if wait.record is None or verdict is None:
            return False
        started, named = wait.record.started, verdict.awaited_ranks
        record = session.describe(wait.active, started, also=named)
        if record is None:
            return False  # the keys exist now
        return still_holds(session.connection, record, session.member, verdict)

    def _emit(self, wait: Wait, verdict: Verdict) -> None:
        waited = waited_seconds(self._recorder, wait.active)
        stall_reports.report(wait, verdict, emit=self._repeats.is_due(wait, waited))

    def _end(self, wait: Wait) -> None:
        """Withdraw what was published about a call that has ended, or mark it."""
        # The store may be gone; that the call has ended is reported all the same.
        with suppress(*STORE_ERRORS):
            if wait.record is not None:
                self._sessions.end(wait.active, wait.record, failed=wait.failed)
        if wait.failed:
            stall_reports.failed(wait)
        elif wait.verdict is not None:
            self._resumed(wait, wait.verdict)

    def _resumed(self, wait: Wait, verdict: Verdict) -> None:
        self._repeats.forget(wait)
        waited = waited_seconds(self._recorder, wait.active)
        stall_reports.resumed(wait, replace(verdict, waited_seconds=waited))

    def check_store(self) -> bool:
        """Report that a store does not respond, if the thread hangs in it.

        Runs in the watcher. Returns whether blocked calls have no verdict yet.
        """
        due = [
            active
            for active in blocked_calls(self._recorder)
            if waited_seconds(self._recorder, active) >= self._stall_after
        ]
        since = self._busy_since
        if since is not None and time.monotonic() - since > _STEP_TIMEOUT:
            for active in due:
                self._report_server(active)
        return any(not self.covers(active.call) for active in due)

    def _report_server(self, active: ActiveCall) -> None:
        wait = self._waits.setdefault(id(active.call), Wait(active))
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
        if election.is_first_of_host():
            stall_reports.report(wait, wait.verdict)
