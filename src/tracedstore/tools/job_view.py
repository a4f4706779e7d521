"""The view of a job at one time: its ranks, barriers, stalls, and one headline.

There is one for all tools: ``status`` prints it, ``top`` shows it, and ``report`` opens
with the sentence about a stall. `attach.live_view` makes it from a reading of a running
job, and `top.replay` from the logs of a finished one. The state of a rank and the
headline are decided here, so that all tools say the same about the same job.

It is made in one process and shown in another, which draws a screen. So neither torch
nor a library for terminals is imported here.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import duration, plural, shorten

if TYPE_CHECKING:
    from tracedstore.coordination.arrivals import MissingReport

# Seconds without a heartbeat after which a node is reported. torch removes a node from
# the rendezvous that has missed three heartbeats of 5 s, and the state has no trace of
# it from then on: so it is reported before.
SILENT_AFTER = 10.0
# Characters of a phase, and of the awaited ranks, in the headline of a report.
_MAX_PHASE_LENGTH = 60
_MAX_AWAITED_LENGTH = 240
# Places of ranks in which nothing moves.
_MAX_PLACES = 4

Level = Literal["good", "notable", "bad"]
# What identifies a rank: the key prefix of its group, and its number.
RankName = tuple[str, int]


NOTHING_KNOWN: Final = (
    "nothing is known: the store has no rank, no barrier and no rendezvous"
)


class RankState(IntEnum):
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


def awaited_state(cause: str) -> RankState:
    """Return the state of a rank that is awaited for the cause of a verdict."""
    if cause in ("gone", "stopped", "not_started"):
        return RankState[cause.upper()]
    return RankState.AWAITED


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
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
        moved: When something last moved in it, in seconds since the epoch: a Store
            call or a collective that ended; None if it is unknown, or moves.
        cpu: The share of one core that it uses; None if it is unknown.
        memory: Its resident memory in bytes; None if it is unknown.
        log: The last line that it logged; "" if it is unknown.
        was_missing: The job has waited for it before.
    """

    rank: int
    host: str
    state: RankState
    pid: int | None = None
    doing: str = ""
    waited: float | None = None
    run_id: str | None = None
    local_rank: int | None = None
    attempt: int = 0
    registered: float | None = None
    endpoint: str | None = None
    group: str = ""
    moved: float | None = None
    cpu: float | None = None
    memory: int | None = None
    log: str = ""
    was_missing: bool = False

    @property
    def name(self) -> RankName:
        """What identifies it."""
        return self.group, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that registered under one key prefix.

    Attributes:
        prefix: The key prefix, with numbers replaced by ``*``.
        world_size: The expected number of ranks.
        hosts: The host of each rank that registered.
    """

    prefix: str
    world_size: int
    hosts: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierView:
    """One barrier.

    Attributes:
        prefix: The prefix of its keys.
        group: The key prefix of the ranks that it belongs to; None if it is unknown.
        complete: The last rank has arrived and has set ``last_member``.
        abandoned: It timed out in a job that went on.
        late: Ranks have yet to arrive, for longer than a barrier may take.
        arrived: The number of counted arrivals.
        world_size: The number of ranks it waits for, None if it is unknown.
        missing: The missing ranks for people; "" if none are, or if they are unknown.
        missing_ranks: The ranks that are certainly missing.
        report: All that the store has about them, for JSON.
        ranks: The ranks that arrived; in order, if there are times.
        times: When they arrived, in seconds since the epoch; empty without a ledger.
        first: The first arrival, None if it is unknown.
        last: The latest arrival, None if it is unknown.
        last_rank: The last rank of a complete barrier, None if it is unknown.
        last_host: Its host.
        timed_out: The ranks that recorded that they timed out here.
        of_agents: It is a barrier of torchrun's agents, whose ranks are other ones.
    """

    prefix: str
    group: str | None = ""
    complete: bool = False
    abandoned: bool = False
    late: bool = False
    arrived: int = 0
    world_size: int | None = None
    missing: str = ""
    missing_ranks: tuple[int, ...] = ()
    report: "MissingReport | None" = None
    ranks: Sequence[int] = field(default_factory=lambda: array("I"))
    times: Sequence[float] = field(default_factory=lambda: array("d"))
    first: float | None = None
    last: float | None = None
    last_rank: int | None = None
    last_host: str | None = None
    timed_out: frozenset[int] = frozenset()
    of_agents: bool = False

    @property
    def awaits_ranks(self) -> bool:
        """Whether ranks have yet to arrive."""
        # All may be counted before the last one sets last_member.
        return not self.complete and self.arrived != self.world_size

    def lag_of_last(self) -> float | None:
        """Return how much later the last rank arrived than half of the ranks."""
        if not self.complete or not self.times:
            return None
        return max(0.0, max(self.times) - median(self.times))

    def sentence(self, now: float) -> str:
        """Return the sentence about a late barrier."""
        ended = self.arrived > 0 and len(self.timed_out) >= self.arrived
        text = f"barrier {self.prefix} {'timed out' if ended else 'waits'}"
        if self.first is not None:
            since = duration(now - self.first)
            text += f", it began {since} ago" if ended else f" for {since}"
        arrived = f"{plural(self.arrived, 'rank')} arrived"
        return f"{text}: {self.missing or arrived}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallView:
    """A wait of the job that its ranks have reported.

    Attributes:
        phase: What the waiting ranks execute.
        awaited: The awaited ranks for people; without any, what is known.
        named: Whether it is known which ranks are awaited.
        cause: Why the awaited ranks do not arrive.
        evidence: How that is known, in short sentences.
        remedy: What to do.
        start: When the longest wait began, in seconds since the epoch.
        reported: When it was reported.
        waiting: The waiting ranks for people.
        waits: Whether one of them still waits.
        reporters: The ranks that have published that they wait.
        fields: The fields of ``job.stalled``.
    """

    phase: str
    awaited: str
    named: bool
    cause: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    start: float
    reported: float
    waiting: str = ""
    waits: bool = True
    reporters: tuple[int, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def sentence(self, now: float | None = None) -> str:
        """Return the sentence about it; with a time, it says for how long."""
        waited = "" if now is None else f" for {duration(max(0.0, now - self.start))}"
        awaited = f"waiting for {self.awaited}" if self.named else self.awaited
        return f"stalled in {self.phase}{waited}: {awaited}"

    def past_sentence(self) -> str:
        """Return the sentence about it after the job has ended, without full stop."""
        verb = "was waiting" if self.waits else "waited"
        text = f"The job {verb} in {shorten(self.phase, _MAX_PHASE_LENGTH)}"
        awaited = shorten(self.awaited, _MAX_AWAITED_LENGTH)
        if self.named:
            text += f" for {awaited}"
        else:
            text += f": {awaited or 'for unknown ranks'}"
        return text if self.waits else f"{text}, and resumed"

    def details(self) -> tuple[str, ...]:
        """Return the cause, the evidence and the remedy, a sentence each."""
        remedy = (f"remedy: {self.remedy}",) if self.remedy else ()
        return f"cause: {self.cause}", *self.evidence, *remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedView:
    """Ranks in the same phase that wait for the same ranks.

    Attributes:
        ranks: The ranks; the first one has waited for longest.
        phase: What they execute.
        awaited: Whom they wait for: ``rank 2``, ``one of ranks 0-3``.
        waited: For how many seconds the first one has waited.
        call: The method and the first key of its call, if they are not in the phase.
    """

    ranks: tuple[int, ...]
    phase: str
    awaited: str
    waited: float
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StillView:
    """Ranks in which nothing has moved for long, with the same place.

    Attributes:
        ranks: The ranks.
        place: Where their main threads were when that was noted; "" if it is unknown.
        since: When something moved last in one of them, in seconds since the epoch.
    """

    ranks: tuple[int, ...]
    place: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupView:
    """A process group of torch in which a collective does not end.

    Attributes:
        name: Its name in torch.
        description: Its description; "" without one.
        members: Its ranks.
        waiting: The ranks that wait in each collective, by its number and what it is:
            ``all_reduce``, with size and type. A number of 0 is unknown.
        called: The number of the last collective that each rank has called, as far as
            it is known.
        behind: The members that have not called what the others wait in.
        started: When the longest wait in it began, in seconds since the epoch.
        places: The lines of the program that called what does not end.
    """

    name: str
    description: str
    members: tuple[int, ...]
    waiting: Mapping[tuple[int, str], tuple[int, ...]]
    called: Mapping[int, int]
    behind: tuple[int, ...]
    started: float
    places: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """Ranks that are in the same Store call, as their endpoints say.

    Attributes:
        ranks: The ranks.
        call: The method and the key.
        waited: For how many seconds the longest of these calls has lasted.
    """

    ranks: tuple[int, ...]
    call: str
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredView:
    """What ranks answered that were asked through the store.

    Attributes:
        activities: What a rank does for people, and all ranks that do the same; the
            odd ones first.
        silent_ranks: Ranks about which nothing is known.
    """

    activities: tuple[tuple[str, tuple[int, ...]], ...]
    silent_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node of a rendezvous.

    Attributes:
        name: Address and pid.
        joined: It is a participant; else it waits for the next round.
        silent: Seconds since its last heartbeat, None if it has sent none.
    """

    name: str
    joined: bool
    silent: float | None

    @property
    def is_silent(self) -> bool:
        """Whether it has sent no heartbeat recently."""
        return self.silent is not None and self.silent > SILENT_AFTER


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """A rendezvous of torchrun's agents.

    Attributes:
        run_id: The run id.
        readable: Its state could be read.
        round: The round, from 0.
        complete: The round has all its nodes.
        closed: No node can join any more.
        worker_store: The URL of the store of the workers, if known.
        problem: Why the worker store could not be read; "" if it was.
        nodes: Its nodes: the participants by their ranks, then those that wait.
    """

    run_id: str
    readable: bool = True
    round: int = 0
    complete: bool = False
    closed: bool = False
    worker_store: str | None = None
    problem: str = ""
    nodes: tuple[NodeView, ...] = ()

    def joined(self, *, joined: bool = True) -> list[NodeView]:
        """Return the participants, or the nodes that wait for the next round."""
        return [node for node in self.nodes if node.joined is joined]

    def sentences(self) -> Iterator[str]:
        """Yield what the job waits for in it."""
        if not self.readable or self.closed:
            return
        if not self.complete:
            joined = f"not complete, nodes joined: {len(self.joined())}"
            yield f"rendezvous {self.run_id} waits in round {self.round}: {joined}"
        for node in self.nodes:
            if node.is_silent:
                heard = f"sent no heartbeat for {duration(node.silent or 0.0)}"
                yield f"rendezvous {self.run_id}: {node.name} {heard}"


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
class LastRank:
    """A rank that arrived last at finished barriers.

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
class JobView:
    """The job at one time.

    Attributes:
        source: The URL of the store, or the names of the logs.
        time: The time of the reading, in seconds since the epoch.
        level: How bad it is.
        headline: How the job is, in one sentence.
        details: The evidence and the remedy, a sentence each.
        missing: What is missing, a short text each.
        notes: What could not be read or confirmed, a sentence each.
        incomplete: Something that belongs to the job could not be read.
        ranks: All ranks.
        groups: The ranks that registered, by the prefix of their keys.
        stalls: The waits that were reported, the latest first; those of agents last.
        blocked: Blocked ranks, those that wait for longest first.
        still: All ranks, if nothing has moved for long in any of them.
        process_groups: The process groups in which a collective does not end, the
            longest wait first.
        calls: The calls in flight, the longest first; None if no rank was queried.
        idle_ranks: Ranks that are in no call.
        unknown_calls: Ranks whose calls are unknown, by the reason.
        answered: What ranks answered, by group; empty if they were not asked.
        in_progress: Barriers in progress, the newest last.
        abandoned: Incomplete barriers of a job that went on, the newest last.
        finished: Complete barriers, the newest last.
        more_in_progress: The number of older incomplete barriers, which are not here.
        more_finished: The number of older complete barriers, which are not here.
        more_blocked: The number of blocked ranks whose records were not read.
        rendezvous: All rendezvous.
        rates: The Store calls; None if they were not requested.
        loading: Nothing has been read yet.
    """

    source: str
    time: float
    level: Level = "good"
    headline: str = ""
    details: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    incomplete: bool = False
    ranks: tuple[RankView, ...] = ()
    groups: tuple[RankGroup, ...] = ()
    stalls: tuple[StallView, ...] = ()
    blocked: tuple[BlockedView, ...] = ()
    still: tuple[StillView, ...] = ()
    process_groups: tuple[ProcessGroupView, ...] = ()
    calls: tuple[CallView, ...] | None = None
    idle_ranks: tuple[int, ...] = ()
    unknown_calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    answered: tuple[AnsweredView, ...] = ()
    in_progress: tuple[BarrierView, ...] = ()
    abandoned: tuple[BarrierView, ...] = ()
    finished: tuple[BarrierView, ...] = ()
    more_in_progress: int = 0
    more_finished: int = 0
    more_blocked: int = 0
    rendezvous: tuple[RendezvousView, ...] = ()
    rates: Rates | None = None
    loading: bool = False

    @property
    def unfinished(self) -> tuple[BarrierView, ...]:
        """All incomplete barriers: the abandoned ones, then those in progress."""
        return *self.abandoned, *self.in_progress

    def waits(self) -> Iterator[tuple[str, ...]]:
        """Yield what the job waits for: a sentence and its details each.

        The stalls are first, then the barriers, the longest wait first.
        """
        for stall in self.stalls:
            if stall.waits:
                yield stall.sentence(self.time), *stall.details()
        late = [one for one in self.in_progress if one.late]
        for barrier in sorted(late, key=lambda one: one.first or 0.0):
            yield (barrier.sentence(self.time),)
        for rendezvous in self.rendezvous:
            for sentence in rendezvous.sentences():
                yield (sentence,)

    def with_headline(self, otherwise: tuple[Level, str] | None = None) -> "JobView":
        """Return it with its headline: what it waits for, else what is missing.

        Args:
            otherwise: How bad it is and the sentence, if it waits for nothing; None to
                say what is missing or healthy.
        """
        if waits := list(self.waits()):
            (sentence, *details), *others = waits
            details += [other for other, *_ in others]
            return replace(self, level="bad", headline=sentence, details=tuple(details))
        if otherwise is None and self.missing:
            details = [
                one
                for stall in self.stalls
                for one in (stall.sentence(self.time), *stall.details())
            ]
            text = f"missing: {', '.join(self.missing)}"
            return replace(self, level="bad", headline=text, details=tuple(details))
        level, text = otherwise or self.nothing_missing()
        return replace(self, level=level, headline=text)

    def nothing_moves(self) -> str:
        """Return for how long nothing has moved, and where ranks are; "" if it has."""
        if not self.still:
            return ""
        since = max(one.since for one in self.still)
        places = [
            f"{ranks_text(one.ranks)} in {one.place or 'an unknown place'}"
            for one in self.still[:_MAX_PLACES]
        ]
        if more := len(self.still) - len(places):
            places.append(f"{plural(more, 'other place')}")
        return (
            f"nothing has moved for {duration(max(0.0, self.time - since))}: no store"
            f" call, barrier or collective has ended; {'; '.join(places)}"
        )

    def unknown(self) -> str:
        """Return why it is not known that nothing is missing; "" if it is."""
        if self.ranks or self.in_progress or self.finished or self.rendezvous:
            as_far = "nothing is missing, as far as can be read from here"
            return as_far if self.incomplete else ""
        readable = " that can be read from here" if self.incomplete else ""
        return f"{NOTHING_KNOWN}{readable}"

    def nothing_missing(self) -> tuple[Level, str]:
        """Return how good it is that nothing is missing, and the sentence."""
        if unknown := self.nothing_moves() or self.unknown():
            return "notable", unknown
        if not self.ranks:
            return "notable", "no rank has registered yet; nothing else is missing"
        started = [one for one in self.ranks if one.registered is not None]
        if len(started) < len(self.ranks):
            text = f"{len(started)} of {len(self.ranks)} ranks have registered"
            return "notable", text
        if self.blocked:
            number = plural(sum(len(one.ranks) for one in self.blocked), "rank")
            longest = duration(max(one.waited for one in self.blocked))
            text = f"{number} blocked, for {longest} at most; nothing is missing yet"
            return "notable", text
        hosts = plural(len({rank.host for rank in self.ranks}), "host")
        ranks = plural(len(self.ranks), "rank")
        return "good", f"healthy: {ranks} on {hosts}, none is missing"

    def last_ranks(self) -> list[LastRank]:
        """Return the last ranks of the finished barriers, the most costly first."""
        lags: dict[tuple[int, str], list[float]] = {}
        for barrier in self.finished:
            lag = barrier.lag_of_last()
            if barrier.last_rank is not None and lag is not None:
                name = barrier.last_rank, barrier.last_host or ""
                lags.setdefault(name, []).append(lag)
        found = [
            LastRank(
                rank=rank,
                host=host,
                times_last=len(each),
                worst=max(each),
                cost=sum(each),
            )
            for (rank, host), each in lags.items()
        ]
        return sorted(found, key=lambda one: (-one.cost, one.rank))


def counts(ranks: Iterable[RankView]) -> str:
    """Return how many ranks are in which state, the worst first."""
    states = Counter(rank.state for rank in ranks)
    return ", ".join(f"{states[one]:,} {one.label}" for one in sorted(states))


class RankStates:
    """Finds the state of each rank; of several states the worst counts.

    Attributes:
        shown_as: The names of ranks, by all names that they have: a process that
            registered under several prefixes is one rank.
        default_group: The group of ranks whose own is unknown.
    """

    def __init__(self) -> None:
        self.shown_as: dict[RankName, RankName] = {}
        self.default_group = ""
        self._ranks: dict[RankName, RankView] = {}
        self._absent: set[RankName] = set()

    def add(self, rank: RankView) -> None:
        """Add a rank. One that has not started is never taken for a late one."""
        self._ranks[rank.name] = rank
        self.shown_as[rank.name] = rank.name
        if rank.state is RankState.NOT_STARTED:
            self._absent.add(rank.name)

    def get(self, group: str | None, number: int) -> RankView | None:
        """Return a rank; None if it is unknown."""
        name = group or "", number
        if name not in self.shown_as:
            name = self.default_group, number
        return self._ranks.get(self.shown_as.get(name, name))

    def ranks(self) -> tuple[RankView, ...]:
        """Return all ranks, by group and number."""
        return tuple(self._ranks[name] for name in sorted(self._ranks))

    def note(self, rank: RankView, **facts: Any) -> None:
        """Set facts about a rank that say nothing about its state."""
        self._ranks[rank.name] = replace(self._ranks[rank.name], **facts)

    def found(self, rank: RankView, host: str, pid: int) -> None:
        """Add the process of a rank that has not registered, and runs all the same."""
        if rank.name in self._absent:
            self._absent.discard(rank.name)
            awaited = self._ranks[rank.name].waited is not None
            state = RankState.AWAITED if awaited else RankState.RUNNING
            self.note(rank, host=host, pid=pid, state=state)

    def worsen(
        self, rank: RankView, state: RankState, doing: str, waited: float | None
    ) -> None:
        """Set the state of a rank, unless it has a worse one."""
        rank = self._ranks[rank.name]
        if rank.name in self._absent and state is RankState.AWAITED:
            state = RankState.NOT_STARTED
        if state <= rank.state:
            self._ranks[rank.name] = replace(
                rank, state=state, doing=doing, waited=waited
            )

    def add_barrier(self, barrier: BarrierView, now: float) -> None:
        """Let the ranks that arrived wait, and those that are late be awaited."""
        at = f"at barrier {barrier.prefix}"
        times = dict(zip(barrier.ranks, barrier.times, strict=False))
        for number in barrier.ranks:
            rank = self.get(barrier.group, number)
            if rank is None:
                continue
            if number in barrier.timed_out:
                self.worsen(rank, RankState.RUNNING, f"timed out {at}", None)
            else:
                waited = max(0.0, now - times[number]) if times else None
                self.worsen(rank, RankState.WAITING, at, waited)
        if not barrier.late:
            return
        age = None if barrier.first is None else max(0.0, now - barrier.first)
        for number in barrier.missing_ranks:
            if (rank := self.get(barrier.group, number)) is not None:
                before = f"; {rank.doing}" if rank.doing else ""
                self.worsen(rank, RankState.AWAITED, f"missing {at}{before}", age)
