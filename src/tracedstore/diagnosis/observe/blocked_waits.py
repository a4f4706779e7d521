"""The blocked Store calls of this process, and what is known about each."""

import math
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.recording.counters import ActiveCall
from tracedstore.recording.recorder import Recorder

# The share of `stall_after` after which a call is examined, so that the verdict is
# known when it is due.
_SHARE_OF_STALL = 0.8
# The share of its own timeout after which it is examined, if that is sooner.
_SHARE_OF_TIMEOUT = 0.4
# Seconds for processes to answer: at most, and as a share of the call's timeout.
_ANSWER_TIMEOUT, _ANSWER_SHARE = 3.0, 0.15
# Seconds within which a call that timed out is repeated. A busy machine may take some.
_PAUSE = 5.0
_MAX_PHASES = 64
# Less than 1, because the caller has measured the same wait a moment before.
_DOUBLED = 0.9


@dataclass(slots=True, eq=False)
class Wait:
    """A blocked call that is being examined.

    Attributes:
        active: The call.
        record: What this process has published about it.
        verdict: Whom it waits for, by the latest verdict.
        current: The verdict is of the current round of looking.
        refuted: A rank that the verdict names has arrived since.
        look_at: When to look next, by ``time.monotonic``.
        refresh_at: When to check next what it waits for, by the same clock.
        interval: Seconds between two looks of a rank that does not look itself.
        round_started: When the current round of looking began, since the epoch.
        order: The position of this process among those that look in this round; 0
            before it took one.
        allowed: How many of them may look.
        elected: This process found the verdict, and reports it.
        reported: It has reported it.
        failed: The call has raised.
        seen_ended: The call was not in flight any more at the last look.
        valid_from: When the verdict was last discarded, since the epoch: one that was
            found before does not hold any more.
    """

    active: ActiveCall
    record: BlockedRecord | None = None
    verdict: Verdict | None = None
    current: bool = False
    refuted: bool = False
    look_at: float = 0.0
    refresh_at: float = 0.0
    interval: float = 1.0
    round_started: float = field(default_factory=time.time)
    order: int = 0
    allowed: int = 2
    elected: bool = False
    reported: bool = False
    failed: bool = False
    seen_ended: bool = False
    valid_from: float = 0.0

    def looking(self) -> float:
        """Return the seconds since the current round of looking began."""
        return time.time() - self.round_started

    def begin_round(self, allowed: int) -> None:
        """Look again."""
        self.current = self.elected = self.reported = False
        self.order, self.allowed = 0, allowed
        self.round_started = time.time()

    def accept(self, verdict: Verdict) -> None:
        """Take a verdict of the current round."""
        self.verdict, self.current, self.refuted = verdict, True, False

    def discard_verdict(self) -> None:
        """Look again at once: a rank that the verdict names has arrived.

        The verdict stays: it may have been reported, and its end is reported too.
        """
        self.current = self.reported = False
        self.refuted = True
        self.look_at = 0.0
        self.valid_from = time.time()


@dataclass(slots=True)
class _Repeated:
    """Calls in one phase that follow each other.

    Attributes:
        since: When the first one began, by ``time.monotonic``.
        ends_at: When the latest one times out, by the same clock.
        report_at: When the next report is due, by the same clock.
    """

    since: float
    ends_at: float
    report_at: float


class Repeats:
    """Finds waits that a program repeats as soon as they have timed out.

    torch does so every 10 s in its barrier after the creation of a process group. Such
    waits are one wait, which is reported again each time it has doubled.
    """

    def __init__(self) -> None:
        # By store and phase.
        self._by_phase: dict[tuple[int, str], _Repeated] = {}
        # A call that has timed out is reported for the thread that made it, by another
        # thread than the diagnosis'.
        self._lock = threading.RLock()

    def is_due(self, wait: Wait, waited: float) -> bool:
        """Return whether a report on a wait is due; if so, it is taken as made.

        Args:
            wait: The wait; the caller knows that it is due by itself.
            waited: How many seconds it has lasted.
        """
        with self._lock:
            return self._is_due(wait, waited)

    def _is_due(self, wait: Wait, waited: float) -> bool:
        now = time.monotonic()
        key = _key(wait)
        known = self._by_phase.pop(key, None)
        if known is None or now - waited > known.ends_at:
            known = _Repeated(since=now - waited, ends_at=now, report_at=now)
        is_due = now >= known.report_at
        if is_due:
            known.report_at = now + _DOUBLED * (now - known.since)
        timeout = timeout_of(wait.active).total_seconds()
        known.ends_at = now + max(0.0, timeout - waited) + _PAUSE
        self._by_phase[key] = known
        if len(self._by_phase) > _MAX_PHASES:
            del self._by_phase[next(iter(self._by_phase))]
        return is_due

    def forget(self, wait: Wait) -> None:
        """Forget a wait that has returned."""
        self._by_phase.pop(_key(wait), None)


def _key(wait: Wait) -> tuple[int, str]:
    return id(wait.active.state), "" if wait.record is None else wait.record.phase


def blocked_calls(recorder: Recorder) -> list[ActiveCall]:
    """Return the calls in flight that may block, without those inside another one."""
    return [
        call
        for call in recorder.counters.calls()
        if call.method.blocks and call.outer is None
    ]


def waited_seconds(recorder: Recorder, call: ActiveCall) -> float:
    """Return how long a call has lasted."""
    return (recorder.ticks() - call.started) / 1e9


def examine_after(call: ActiveCall, stall_after: float) -> float:
    """Return the seconds after which a call is examined."""
    after = stall_after * _SHARE_OF_STALL
    timeout = timeout_of(call).total_seconds()
    # A timeout of zero or less is none.
    return min(after, timeout * _SHARE_OF_TIMEOUT) if timeout > 0 else after


def answer_timeout(call: ActiveCall) -> float:
    """Return the seconds that processes get to answer while a call waits."""
    timeout = timeout_of(call).total_seconds()
    return min(_ANSWER_TIMEOUT, _ANSWER_SHARE * timeout if timeout > 0 else math.inf)


def timeout_of(call: ActiveCall) -> timedelta:
    """Return the timeout of a call: its argument, else that of its store."""
    given = [value for value in call.args if isinstance(value, timedelta)]
    return given[-1] if given else call.state.timeout
