"""Ends a process whose job cannot go on: ``TRACEDSTORE_ON_STALL=abort``.

A rank that has ended, or that called another collective, does not come. Without help
the others wait for the timeout of the process group, and torchrun restarts the job
after that. Other causes pass by themselves, or nobody knows that they do not.

One process ends, and the launcher restarts or ends the others. It is one that has found
the verdict itself. What the store has from others is not enough, because any client can
write there:

- This process is in the wait that the verdict is about, for twice `stall_after`: in its
  main thread, or nothing else moves in it.
- It has found the same verdict twice, `stall_after` apart.
- The processes of the ranks at the head of the verdict confirm it, just now.

The agents of torchrun are never ended.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tracedstore.common.causes import Cause
from tracedstore.diagnosis.judgement.inquiry import is_confirmed
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.pending_collectives import PendingCollective
from tracedstore.diagnosis.rounds import Wait
from tracedstore.diagnosis.store_diagnosis import StoreDiagnosis

# These do not pass by themselves.
LASTING: Final[tuple[Cause, ...]] = ("gone", "mismatch", "diverged")
# Ends the process with a verdict, if the wait still lasts then.
EndProcess = Callable[[Verdict, Callable[[], bool]], None]


class StallAction:
    """Ends this process after a verdict that has held.

    Args:
        stall_after: Seconds after which a wait is reported, and for which a verdict has
            to hold after that.
        still_seconds: Returns for how long nothing has moved in this process; 0 if that
            is not known.
        end_process: Ends the process.
    """

    def __init__(
        self,
        stall_after: float,
        still_seconds: Callable[[], float],
        end_process: EndProcess,
    ) -> None:
        self._stall_after = stall_after
        self._still_seconds = still_seconds
        self._end_process = end_process

    def consider(self, store: StoreDiagnosis, wait: Wait) -> None:
        """End the process if a wait has come to that."""
        now, verdict = time.monotonic(), wait.verdict
        if store.member.agents is not None or wait.failed or wait.refuted:
            wait.found = None
            return
        # With another verdict, or another process that found it, the time goes on.
        if (
            wait.found is None
            and verdict is not None
            and wait.elected
            and wait.reported
            and verdict.cause in LASTING
            and verdict.awaited_ranks
        ):
            wait.found, wait.act_at = verdict, now + self._stall_after
        if wait.found is None or now < wait.act_at:
            return
        found, wait.found = wait.found, None
        if wait.repeated.waited() < 2 * self._stall_after or not self._hangs(wait):
            return
        again = store.find_verdict(wait)
        if again is None:
            # A rank is about to publish something: look again soon.
            wait.found, wait.act_at = found, now + self._stall_after / 4
            return
        same = (again.cause, again.awaited_ranks) == (found.cause, found.awaited_ranks)
        if not (same and is_confirmed(store.connection, store.member, again)):
            return
        held = replace(again, waited_seconds=wait.repeated.waited())
        self._end_process(held, lambda: store.lasts(wait))

    def _hangs(self, wait: Wait) -> bool:
        """Return whether the process waits, and not a thread beside its work alone."""
        pending = wait.pending
        if pending is None:
            return False
        is_in_it = (
            not isinstance(pending, PendingCollective) or pending.call.is_synchronous
        )
        if is_in_it and pending.thread_id == threading.main_thread().ident:
            return True
        return self._still_seconds() >= self._stall_after
