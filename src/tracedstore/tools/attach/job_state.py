"""The state of a job as its store records it."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tracedstore.coordination.arrivals import Ledger
from tracedstore.coordination.missing_report import MissingReport
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.tools.attach.stalled_ranks import Stall

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import RendezvousState


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that registered under one key prefix.

    Attributes:
        prefix: The key prefix, with numbers replaced by ``*``.
        world_size: The expected number of ranks.
        ranks: The ranks that registered.
    """

    prefix: str
    world_size: int
    ranks: tuple[RankInfo, ...]

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each registered rank."""
        return {info.rank: info.host for info in self.ranks}


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierState:
    """One barrier, read from its keys.

    Attributes:
        prefix: The prefix of its keys.
        complete: The last rank has arrived and has set ``last_member``.
        arrived: The number of counted arrivals.
        world_size: The number of ranks it waits for; None if unknown.
        missing_report: The missing ranks of a barrier in progress; None if unknown.
        first_arrival: Time of the first arrival, in seconds since the epoch; None
            without a ledger.
        last_arrival: Time of the latest arrival, in the same unit.
        last_rank: The last rank to arrive at a complete barrier; None if unknown.
        last_host: The host of that rank; None if unknown.
        ledger: The arrivals; empty without a ledger.
        timed_out: The ranks that recorded that they timed out here.
        group: The prefix of the group that it belongs to; None if unknown.
    """

    prefix: str
    complete: bool
    arrived: int
    world_size: int | None = None
    missing_report: MissingReport | None = None
    first_arrival: float | None = None
    last_arrival: float | None = None
    last_rank: int | None = None
    last_host: str | None = None
    ledger: Ledger = field(default_factory=Ledger)
    timed_out: frozenset[int] = frozenset()
    group: str | None = None

    @property
    def awaits_ranks(self) -> bool:
        """Whether ranks have yet to arrive."""
        # All may be counted before the last one sets last_member.
        return not self.complete and self.arrived != self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Ranks, barriers and rendezvous in the store of a job.

    Attributes:
        groups: The ranks that registered.
        in_progress: Barriers that are not complete, the newest last.
        unread_in_progress: The number of older incomplete barriers, which were not
            read.
        abandoned: Barriers that timed out in a job that continued.
        finished: The newest complete barriers, the newest last.
        unread_finished: The number of older complete barriers, which were not read.
        rendezvous: The state of each rendezvous by run id; None if it cannot be
            parsed.
        worker_stores: The URL of the store that a rendezvous made for its workers, by
            run id; None if its address is not a host and a port.
        unreadable_stores: Why a worker store could not be read, by its URL.
        unreadable_barriers: The prefixes of barriers whose keys have values that are
            not a barrier's, or that are too large.
        unread_ledgers: The number of barriers that were not read, because the ledgers
            of newer ones are too large together.
        invalid_entries: The number of registry entries that are not valid.
        stalls: The verdicts and blocked ranks.
        invalid_records: The number of verdicts and records of blocked ranks that are
            not valid.
        unread_records: The number of records of blocked ranks that were not read.
        invalid_keys: Keys of an etcd that no Store has written.
    """

    groups: tuple[Group, ...]
    in_progress: tuple[BarrierState, ...]
    unread_in_progress: int
    abandoned: tuple[BarrierState, ...]
    finished: tuple[BarrierState, ...]
    unread_finished: int
    rendezvous: "dict[str, RendezvousState | None]"
    worker_stores: dict[str, str | None]
    unreadable_stores: dict[str, str] = field(default_factory=dict)
    unreadable_barriers: tuple[str, ...] = ()
    unread_ledgers: int = 0
    invalid_entries: int = 0
    stalls: tuple[Stall, ...] = ()
    invalid_records: int = 0
    unread_records: int = 0
    invalid_keys: tuple[str, ...] = ()

    def running_worker_stores(self) -> set[str]:
        """Return the URLs of worker stores whose rendezvous is not closed."""
        return {
            url
            for run_id, url in self.worker_stores.items()
            if url and (state := self.rendezvous.get(run_id)) and not state.closed
        }

    def merge(self, workers: "JobState") -> "JobState":
        """Return this state with the ranks and barriers of a worker store added."""
        return replace(
            self,
            groups=self.groups + workers.groups,
            in_progress=self.in_progress + workers.in_progress,
            unread_in_progress=self.unread_in_progress + workers.unread_in_progress,
            abandoned=self.abandoned + workers.abandoned,
            finished=self.finished + workers.finished,
            unread_finished=self.unread_finished + workers.unread_finished,
            unreadable_barriers=self.unreadable_barriers + workers.unreadable_barriers,
            unread_ledgers=self.unread_ledgers + workers.unread_ledgers,
            invalid_entries=self.invalid_entries + workers.invalid_entries,
            stalls=self.stalls + workers.stalls,
            invalid_records=self.invalid_records + workers.invalid_records,
            unread_records=self.unread_records + workers.unread_records,
            invalid_keys=self.invalid_keys + workers.invalid_keys,
        )
