"""Connecting as a phase of a job: reports a store's constructor that does not return.

The spelling of the address is checked before torch connects. While the constructor
lasts, the watcher looks at it: on the serving rank, which ranks have not connected; on
the others, what a connection attempt of our own runs into. An exception of the
constructor gets the verdict as a note, and is otherwise unchanged.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from tracedstore import names
from tracedstore.common import causes
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.threads import run_with_timeout, start_bounded_thread
from tracedstore.diagnosis.connection import connection_attempt, file_store
from tracedstore.diagnosis.connection.addresses import ConnectTarget
from tracedstore.diagnosis.connection.serving import ServerSide
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.stall_reports import Claim, claim
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe import incarnations
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER

# Seconds after which the serving rank publishes what it waits for.
_PUBLISH_AFTER = 1.0
# Seconds that a constructor which has ended waits for the last step of the diagnosis.
_END_TIMEOUT = 1.0

# The claims that this process keeps, by what is reported.
_kept: dict[str, Claim] = {}

_guarded = partial(RECORDER.failures.guarded, names.DIAGNOSIS)


def reset() -> None:
    """Drop the claims, as a forked child must: the parent has them."""
    while _kept:
        # Nothing is released: the parent's file stays open.
        _kept.popitem()[1].close()


@contextmanager
def watched(target: ConnectTarget | None) -> Iterator[None]:
    """Diagnose a store's constructor that runs in this context.

    Args:
        target: Where it connects to; None if that is unknown, and nothing is done.
    """
    if target is None or not RECORDER.on:
        yield
        return
    if target.path:
        _guarded(_check_file, target)
        yield
        return
    phase = ConnectingPhase(target, RECORDER.overdue_ns / 1e9)
    _guarded(phase.start)
    try:
        yield
    except BaseException as error:
        # What a signal handler raises gets no note, and does not wait for a verdict.
        ended = phase.abandoned if raised_by_handler(error) else phase.failed
        _guarded(ended, error)
        raise
    _guarded(phase.returned)


def _check_file(target: ConnectTarget) -> None:
    """Report a file that an earlier run left, once per host and job."""
    try:
        verdict = run_with_timeout(
            _END_TIMEOUT,
            partial(file_store.check_earlier_run, target.path, target.rank),
        )
    except TimeoutError:
        return  # the file system does not answer; the store will not either
    if verdict is None:
        return
    # Kept until the process ends: the other ranks of the host may open the file later.
    what = f"{target.path}/{verdict.cause}"
    if what not in _kept and (claimed := claim(what)) is not None:
        _kept[what] = claimed
        incarnations.report_stale(verdict.describe(), remedy=verdict.remedy)


class ConnectingPhase:
    """One call of a store's constructor, and the watch of it.

    It is no `Watch` with a method of this object: the two would refer to each other,
    and be left to garbage collection after every constructor.

    Args:
        target: Where it connects to.
        stall_after: Seconds after which it counts as stalled; infinity for never.

    Attributes:
        started: When the constructor began, by ``time.monotonic``.
        due: When the watcher calls `report` next.
    """

    observer = names.DIAGNOSIS

    def __init__(self, target: ConnectTarget, stall_after: float) -> None:
        self._target = target
        self._stall_after = stall_after
        # Early enough for the note of the exception at the timeout.
        self._look_after = min(stall_after, target.timeout / 2)
        first = self._look_after
        self._server: ServerSide | None = None
        # Agents do not register.
        if target.serving and not target.agents and (target.world_size or 0) > 1:
            self._server = ServerSide(target, time.time())
            first = min(first, _PUBLISH_AFTER)
        self._watched = math.isfinite(first)
        self.started = time.monotonic()
        self.due = self.started + first
        self._lock = threading.Lock()
        self._busy = False
        self._ended = False
        self._verdict: Verdict | None = None
        self._reported: Verdict | None = None
        self._claimed = ""
        # Another process of this host reports.
        self._left_to_other = False

    def start(self) -> None:
        """Check the spelling of the address, and watch the constructor."""
        defect = self._target.check_spelling()
        if defect is not None:
            self._verdict = connection_attempt.from_defect(self._target, defect)
            self._report_verdict()
        if self._watched:
            WATCHER.add(self)

    def abandoned(self, _error: BaseException) -> None:
        """Note that a signal handler has ended the constructor."""
        self._end()

    def failed(self, error: BaseException) -> None:
        """Add the verdict to the exception that ends the constructor."""
        verdict = self._end()
        # Nothing to withdraw: the server ended with the constructor.
        if not isinstance(error, Exception):
            return
        cause = causes.classify(error)
        if cause == causes.ADDRESS_IN_USE:
            verdict = run_with_timeout(
                _END_TIMEOUT, partial(connection_attempt.port_in_use, self._target)
            )
        elif verdict is None and self._target.serving:
            # It failed before the first look. Its server is gone, but not its address.
            with suppress(TimeoutError):
                verdict = run_with_timeout(_END_TIMEOUT, self._check_address)
        elif verdict is None:
            verdict = connection_attempt.verdict_on(
                self._target, self._reach_after(cause), self._waited()
            )
        if verdict is None:
            return
        self._verdict = replace(verdict, waited_seconds=self._waited())
        error.add_note(f"tracedstore: {self._verdict.describe()}")
        # The process that has the claim may have failed and ended a moment ago.
        due = math.isfinite(self._stall_after) and self._reported is None
        if due and not self._left_to_other:
            self._report_verdict()
        # The claim is kept: the constructors of the other ranks fail in a moment.
        stall_reports.failed(self)

    def returned(self) -> None:
        """Withdraw what was published: the constructor has returned."""
        self._end()
        if self._server is not None:
            with suppress(TimeoutError):
                run_with_timeout(_END_TIMEOUT, self._server.withdraw)
        if self._reported is not None:
            waited = self._waited()
            stall_reports.resumed(self, replace(self._reported, waited_seconds=waited))
        if self._claimed:
            _kept.pop(self._claimed).close()

    def _reach_after(self, cause: str) -> connection_attempt.ConnectionAttempt:
        """Return what a connection attempt runs into after torch's have failed.

        Args:
            cause: What torch's exception says. It often has a text for all causes:
                "the client socket has timed out".
        """
        if cause in ("", causes.NO_ANSWER):
            cause = causes.UNKNOWN
        try:
            reached = run_with_timeout(
                _END_TIMEOUT, partial(connection_attempt.connect_once, self._target)
            )
        except TimeoutError:
            return connection_attempt.ConnectionAttempt(result=cause)
        if reached.result == connection_attempt.HUNG_UP:
            return replace(reached, result=causes.CONNECTION_LOST)
        return replace(reached, result=cause) if reached.answered else reached

    def _check_address(self) -> Verdict | None:
        defect = connection_attempt.connect_once(self._target, os.environ).defect
        return (
            None
            if defect is None
            else connection_attempt.from_defect(self._target, defect)
        )

    def _end(self) -> Verdict | None:
        WATCHER.remove(self)
        with self._lock:
            self._ended = True
            return self._verdict

    def _waited(self) -> float:
        return time.monotonic() - self.started

    # In the watcher's thread and in bounded threads.

    def report(self) -> float:
        """Start what is due; return the seconds until the next step."""
        waited = self._waited()
        with self._lock:
            busy, self._busy = self._busy, True
        if not busy:
            work = self._look if waited >= self._look_after else self._publish
            try:
                # The other watches must not wait for it.
                start_bounded_thread(partial(self._run, work))
            except RuntimeError:  # no thread now; the next step tries again
                self._busy = False
                raise
        points = (self._look_after, self._stall_after, 2 * waited)
        return min(point for point in points if point > waited) - waited

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, RuntimeError):
            # The store's: a server that ended, or has not begun to listen.
            return
        except Exception as error:
            RECORDER.failures.add(names.DIAGNOSIS, error)
        finally:
            with self._lock:
                self._busy = False

    def _publish(self) -> None:
        if self._server is not None:
            self._server.publish()

    def _look(self) -> None:
        reached = connection_attempt.connect_once(self._target, os.environ)
        found = connection_attempt.verdict_on(self._target, reached, self._waited())
        if self._server is not None and reached.answered:
            found = self._server.verdict(reached, self._waited())
        with self._lock:
            if self._ended:
                return
            self._verdict = found
        if self._waited() >= self._stall_after:
            self._report_verdict()
        elif found is not None and self._server is None:
            self._take_claim(found)

    def _report_verdict(self) -> None:
        verdict = self._verdict
        if verdict is None:
            return
        if self._server is None and not self._take_claim(verdict):
            return
        self._reported = verdict
        stall_reports.report(self, verdict)

    def _take_claim(self, verdict: Verdict) -> bool:
        """Return whether this process reports, of those of its host.

        The ranks that cannot connect share no store, and a host may have many.
        """
        what = self._claimed or f"{self._target.server}/{verdict.cause}"
        if what not in _kept and (claimed := claim(what)) is not None:
            _kept[what] = claimed
        self._left_to_other = what not in _kept
        self._claimed = "" if self._left_to_other else what
        return not self._left_to_other
