"""The blocked Store calls of this process, and what is known about each."""

import time
from dataclasses import dataclass, field
from datetime import timedelta

from tracedstore.core.counters import ActiveCall
from tracedstore.core.recorder import Recorder
from tracedstore.diagnosis.blocked_record import BlockedRecord
from tracedstore.diagnosis.verdict import Verdict

# The share of `stall_after` after which a call is examined, so that the verdict is
# known when it is due.
_SHARE_OF_STALL = 0.8
# The share of its own timeout after which it is examined, if that is sooner.
_SHARE_OF_TIMEOUT = 0.4


@dataclass(slots=True, eq=False)
class Wait:
    """A blocked call that is being examined.

    Attributes:
        active: The call.
        record: What this process has published about it.
        verdict: Whom it waits for, by the latest verdict.
        current: The verdict is of the current round of looking.
        look_at: When to look next, by ``time.monotonic``.
        refresh_at: When to check next what it waits for, by the same clock.
        round_started: When the current round of looking began, since the epoch.
        order: The position of this process among those that look in this round; 0
            before it took one.
        allowed: How many of them may look.
        elected: This process found the verdict, and reports it.
        reported: It has reported it.
        failed: The call has raised.
    """

    active: ActiveCall
    record: BlockedRecord | None = None
    verdict: Verdict | None = None
    current: bool = False
    look_at: float = 0.0
    refresh_at: float = 0.0
    round_started: float = field(default_factory=time.time)
    order: int = 0
    allowed: int = 2
    elected: bool = False
    reported: bool = False
    failed: bool = False

    def begin_round(self, allowed: int) -> None:
        """Look again."""
        self.current = self.elected = self.reported = False
        self.order, self.allowed = 0, allowed
        self.round_started = time.time()


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


def timeout_of(call: ActiveCall) -> timedelta:
    """Return the timeout of a call: its argument, else that of its store."""
    given = [value for value in call.args if isinstance(value, timedelta)]
    return given[-1] if given else call.state.timeout
