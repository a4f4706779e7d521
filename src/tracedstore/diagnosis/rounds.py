"""A wait of a rank that is being examined, in rounds.

In a round a verdict is looked for. The next round begins when the wait has doubled.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tracedstore.common import election
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord
from tracedstore.diagnosis.observe.waits import Pending, Repeated

if TYPE_CHECKING:
    from tracedstore.diagnosis.store_diagnosis import StoreDiagnosis

# Ranks that have not reported a wait look so much later than those that have: a share
# of the wait, and at most so many seconds. Some of these have waited for less.
_LATER_SHARE: Final = 0.5
_MAX_LATER: Final = 30.0


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of a rank that is being examined.

    Attributes:
        pending: What the rank waits in. None while a call that has timed out may be
            repeated: the store of that call is not kept.
        repeated: Since when it waits.
        store: The diagnosis of its store.
        record: What this process has published about it.
        verdict: Whom it waits for, by the latest verdict.
        current: The verdict is of the current round of looking.
        refuted: A rank that the verdict names has arrived since.
        look_at: When to look next, by ``time.monotonic``.
        refresh_at: When to check next what it waits for, by the same clock.
        round_started: When the current round of looking began, since the epoch. In the
            future while those look that have reported the wait before.
        order: The position of this process among those that look in this round; 0
            before it took one.
        allowed: How many of them may look.
        fruitless: The number of looks without a verdict, in this round.
        elected: This process found the verdict, and reports it.
        reported: It has reported it.
        failed: The call has raised.
        seen_ended: The call was not in flight any more at the last look.
        valid_from: When the verdict was last discarded, since the epoch: one that was
            found before does not hold any more.
        found: The verdict that this process has found itself, and reported, if it may
            end the process (`stall_action`).
        act_at: When to do that, by ``time.monotonic``.
        claimed: The claim under which it was reported for this host, "" without one.
    """

    pending: Pending | None
    repeated: Repeated
    store: "StoreDiagnosis"
    record: BlockedRecord | None = None
    verdict: Verdict | None = None
    current: bool = False
    refuted: bool = False
    look_at: float = 0.0
    refresh_at: float = 0.0
    round_started: float = field(default_factory=time.time)
    order: int = 0
    allowed: int = election.REPORTERS
    fruitless: int = 0
    elected: bool = False
    reported: bool = False
    failed: bool = False
    seen_ended: bool = False
    valid_from: float = 0.0
    found: Verdict | None = None
    act_at: float = 0.0
    claimed: str = ""

    def looking(self) -> float:
        """Return the seconds since the round of looking began; negative before it."""
        return time.time() - self.round_started

    def is_to_look_again(self, now: float, stall_after: float) -> bool:
        """Return whether the next round is due.

        It is due when the wait has doubled since the report, or if the verdict is old
        when the report is due: a call with a short timeout is examined early.
        """
        if self.reported:
            return now >= self.look_at
        waited = self.repeated.waited()
        if self.verdict is None or not self.current or waited < stall_after:
            return False
        return time.time() - self.verdict.time > waited / 2

    def begin_round(self) -> None:
        """Look again; first those that have reported the wait.

        Else other ranks would report the same stall each time it has doubled.
        """
        later = 0.0
        if self.reported and not self.elected:
            later = min(_LATER_SHARE * self.repeated.waited(), _MAX_LATER)
        self.current = self.elected = self.reported = False
        self.order, self.allowed = 0, election.REPORTERS
        self.fruitless = 0
        self.round_started = time.time() + later

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
