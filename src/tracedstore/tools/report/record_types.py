"""The types that ``Records`` consists of."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# Outcomes of a barrier call, from the event that reports it. WAITING is a warning: the
# call had not ended yet.
COMPLETED, WAITING, TIMEOUT, FAILED = range(4)


class BarrierId(NamedTuple):
    """The key prefix of a barrier, and the job that uses it."""

    run_id: str
    prefix: str


class EventDetail(NamedTuple):
    """Details of an event about a barrier call that did not complete.

    Attributes:
        text: The text on missing ranks, or the error.
        missing: The missing ranks, as folded ranges.
    """

    text: str
    missing: str

    @property
    def content(self) -> str:
        """What two reports must have in common to agree.

        The text also says what the missing ranks do, which changes between two looks.
        """
        return self.missing or self.text


# Position of NO_DETAIL in Records.details.
NO_DETAIL_INDEX: Final = 0
NO_DETAIL: Final = EventDetail("", "")


class LoggedProcess(NamedTuple):
    """The process that logged an event."""

    run_id: str
    rank: int
    host: str
    pid: int


class FirstFailure(NamedTuple):
    """The first failure of a process.

    Attributes:
        time: Seconds since 1970, by the clock of its host.
        event: Name of the event.
        subject: The barrier, the call or the rendezvous that failed.
        error: Error type and message.
    """

    time: float
    event: str
    subject: str
    error: str


@dataclass(slots=True)
class CallStats:
    """Statistics of the store calls of one kind.

    Attributes:
        logged: Number of events.
        suppressed_count: Number of calls that these events report as not logged.
        maximum: The longest duration in seconds, or the most losses in a row.
        maximum_key: The key of that call.
        ranks: Ranks that logged such calls.
        errors: Error types, with their counts.
    """

    logged: int = 0
    suppressed_count: int = 0
    maximum: float = -1.0
    maximum_key: str = ""
    ranks: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Minimum number of calls."""
        return self.logged + self.suppressed_count


class BarrierCallColumns:
    """All logged barrier calls, one array per field.

    Attributes:
        barrier: Position of the barrier in Records.barrier_ids.
        rank: The calling rank, or NO_RANK.
        end: When the event was logged, in seconds since 1970.
        waited: Seconds from the arrival of the rank until then.
        outcome: COMPLETED, WAITING, TIMEOUT or FAILED.
        last_rank: The rank that arrived last, or NO_RANK.
        detail: Position of the details in Records.details.
        pid: The calling process; 0 if not known.
    """

    def __init__(self) -> None:
        self.barrier = array("l")
        self.rank = array("l")
        self.end = array("d")
        self.waited = array("d")
        self.outcome = array("b")
        self.last_rank = array("l")
        self.detail = array("l")
        self.pid = array("l")

    def __len__(self) -> int:
        return len(self.barrier)
