"""What the screen shows, as plain data: it is made in one process, shown in another.

Neither torch nor a library for terminals is imported here.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any, Final, Literal


class State(IntEnum):
    """The state of a rank; the worst is the lowest."""

    GONE = 0
    STOPPED = 1
    AWAITED = 2
    NOT_STARTED = 3
    NO_ANSWER = 4
    WAITING = 5
    RUNNING = 6

    @property
    def label(self) -> str:
        """The word for people."""
        return self.name.lower().replace("_", " ")


# One character each, so that the grid reads without colours.
GLYPHS: Final = {
    State.GONE: "X",
    State.STOPPED: "S",
    State.AWAITED: "A",
    State.NOT_STARTED: "-",
    State.NO_ANSWER: "?",
    State.WAITING: "w",
    State.RUNNING: ".",
}

Level = Literal["good", "notable", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank.

    Attributes:
        rank: The rank.
        host: Its host, "" if it is unknown.
        state: Its state.
        pid: Its process id, None if it is unknown.
        doing: What is known about what it does, for people; "" if nothing is.
        waited: Seconds for which it has waited, or has been waited for; None if it is
            neither.
        run_id: The run id of its job, if known.
        local_rank: Its rank on its host, if known.
        attempt: The attempt of torchrun.
        registered: When it registered, in seconds since the epoch; None if it has not.
        endpoint: The URL of its metrics, if it serves them.
        group: The key prefix under which it registered.
    """

    rank: int
    host: str
    state: State
    pid: int | None = None
    doing: str = ""
    waited: float | None = None
    run_id: str | None = None
    local_rank: int | None = None
    attempt: int = 0
    registered: float | None = None
    endpoint: str | None = None
    group: str = ""

    @property
    def name(self) -> tuple[str, int]:
        """What identifies it on the screen."""
        return self.group, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """One barrier.

    Attributes:
        prefix: The prefix of its keys.
        group: The key prefix of the ranks that it belongs to.
        complete: All ranks have arrived.
        abandoned: It timed out in a job that went on.
        arrived: The number of arrivals.
        world_size: The number of ranks it waits for, None if it is unknown.
        missing: The missing ranks for people; "" if none are, or if they are unknown.
        missing_ranks: The ranks that are certainly missing.
        ranks: The ranks that arrived, in order; empty without a ledger.
        times: When they arrived, in seconds since the epoch.
        first: The first arrival, None if it is unknown.
        last: The latest arrival, None if it is unknown.
        last_rank: The last rank of a complete barrier, None if it is unknown.
        last_host: Its host.
    """

    prefix: str
    group: str = ""
    complete: bool = False
    abandoned: bool = False
    arrived: int = 0
    world_size: int | None = None
    missing: str = ""
    missing_ranks: tuple[int, ...] = ()
    ranks: Sequence[int] = field(default_factory=lambda: array("I"))
    times: Sequence[float] = field(default_factory=lambda: array("d"))
    first: float | None = None
    last: float | None = None
    last_rank: int | None = None
    last_host: str | None = None

    def lag_of_last(self) -> float | None:
        """Return how much later the last rank arrived than half of the ranks."""
        if not self.complete or not self.times:
            return None
        return max(0.0, max(self.times) - median(self.times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that arrived last.

    Attributes:
        rank: The rank.
        host: Its host.
        times_last: At how many barriers it was the last one.
        worst: Its largest lag, in seconds.
        cost: The sum of its lags: what the job would have saved without it.
    """

    rank: int
    host: str
    times_last: int
    worst: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousNode:
    """A node of a rendezvous.

    Attributes:
        name: Address and pid.
        joined: It is a participant; else it waits for the next round.
        silent: Seconds since its last heartbeat, None if it has sent none.
    """

    name: str
    joined: bool
    silent: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A rendezvous of torchrun's agents.

    Attributes:
        run_id: The run id.
        readable: Its state could be read.
        round: The round, from 0.
        complete: The round has all its nodes.
        closed: No node can join any more.
        worker_store: The URL of the store of the workers, if known.
        problem: Why the worker store could not be read; "" if it was.
        nodes: Its nodes.
    """

    run_id: str
    readable: bool = True
    round: int = 0
    complete: bool = False
    closed: bool = False
    worker_store: str | None = None
    problem: str = ""
    nodes: tuple[RendezvousNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRate:
    """The calls of one Store method, of all ranks that were read.

    Attributes:
        operation: The method.
        per_second: Calls a second.
        p50: Half of the calls took no longer, in seconds; None without calls.
        p99: The same for 99 of 100.
        history: Calls a second at earlier readings, the latest last.
    """

    operation: str
    per_second: float
    p50: float | None
    p99: float | None
    history: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRate:
    """The calls of one rank.

    Attributes:
        rank: The rank.
        host: Its host.
        per_second: Calls a second.
        p99: 99 of 100 calls took no longer, in seconds; None without calls.
        lost: Compare-and-sets lost a second.
    """

    rank: int
    host: str
    per_second: float
    p99: float | None
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The Store calls of the ranks whose endpoints answered.

    Attributes:
        operations: By method, the most frequent first.
        ranks: By rank, the busiest first.
        lost: Compare-and-sets lost a second.
        lost_history: The same at earlier readings.
        serving: The number of ranks that serve an endpoint.
    """

    operations: tuple[OperationRate, ...] = ()
    ranks: tuple[RankRate, ...] = ()
    lost: float = 0.0
    lost_history: tuple[float, ...] = ()
    serving: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The job at one time.

    Attributes:
        source: The URL of the store, or the names of the logs.
        time: The time of the reading, in seconds since the epoch.
        level: How bad it is.
        headline: How the job is, in one sentence.
        details: The evidence and the remedy, a sentence each.
        notes: What could not be read.
        ranks: All ranks.
        in_progress: Barriers in progress and abandoned ones, the newest last.
        finished: Complete barriers, the newest last.
        more_finished: The number of complete barriers that are not in the list.
        rendezvous: All rendezvous.
        rates: The Store calls; None if they were not requested.
        stalls: The fields of ``job.stalled`` for each verdict, with its time.
        seconds: How long the reading took.
    """

    source: str
    time: float
    level: Level = "good"
    headline: str = ""
    details: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: tuple[Rank, ...] = ()
    in_progress: tuple[Barrier, ...] = ()
    finished: tuple[Barrier, ...] = ()
    more_finished: int = 0
    rendezvous: tuple[Rendezvous, ...] = ()
    rates: Rates | None = None
    stalls: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0

    def stragglers(self) -> list[Straggler]:
        """Return the last ranks of the finished barriers, the most costly first."""
        lags: dict[tuple[int, str], list[float]] = {}
        for barrier in self.finished:
            lag = barrier.lag_of_last()
            if barrier.last_rank is not None and lag is not None:
                name = barrier.last_rank, barrier.last_host or ""
                lags.setdefault(name, []).append(lag)
        found = [
            Straggler(
                rank=rank,
                host=host,
                times_last=len(each),
                worst=max(each),
                cost=sum(each),
            )
            for (rank, host), each in lags.items()
        ]
        return sorted(found, key=lambda one: (-one.cost, one.rank))
