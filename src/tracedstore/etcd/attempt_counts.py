"""Counts the requests inside one Store call, by the thread that makes it."""

from dataclasses import dataclass, field
from threading import get_ident

from tracedstore.recording.operation import Attempts, EtcdRequest


@dataclass(slots=True)
class AttemptCounts:
    """The counts of a call that lasts; see `Attempts`."""

    requests: int = 0
    swaps_won: int = 0
    swaps_lost: int = 0
    watch_timeouts: int = 0
    recoveries: int = 0
    shown: list[EtcdRequest] = field(default_factory=list)


class AttemptCounter:
    """Counts what a thread does between `start` and `stop`.

    What a thread does without a traced call is not counted: a rendezvous backend may
    share the client.
    """

    def __init__(self) -> None:
        self._counts: dict[int, AttemptCounts] = {}

    def start(self) -> None:
        """Start to count for this thread."""
        self._counts[get_ident()] = AttemptCounts()

    def stop(self) -> Attempts:
        """Stop counting for this thread, and return the counts."""
        counts = self._counts.pop(get_ident())
        return Attempts(
            requests=counts.requests,
            swaps_won=counts.swaps_won,
            swaps_lost=counts.swaps_lost,
            watch_timeouts=counts.watch_timeouts,
            recoveries=counts.recoveries,
            shown=tuple(counts.shown),
        )

    def current(self) -> AttemptCounts | None:
        """Return the counts of this thread's call; None without one."""
        return self._counts.get(get_ident())
