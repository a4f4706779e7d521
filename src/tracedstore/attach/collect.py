"""What a job's store says of the job."""

import re
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tracedstore.attach.abandoned import AbandonedBarriers
from tracedstore.attach.snapshot import StoreSnapshot
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import read_arrivals, read_ledger
from tracedstore.coordination.decoders import chain, default_name
from tracedstore.coordination.missing_report import MissingReport
from tracedstore.coordination.protocol import BarrierKeys, LastArrival
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.core import keys as families

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import RendezvousState

# Barriers leave their keys behind, so a long job has many thousands. Of each kind, the
# ledgers of so many are read.
MAX_LEDGERS = 64
_END = "/num_members"
# Below the key of a rendezvous, with its round, is where its agents meet; and there,
# where the store is that they made for their workers.
_RENDEZVOUS = re.compile(r"(?:.*/)?torch\.rendezvous\.((?:(?!\.\d+/).)+)", re.DOTALL)
_MASTER = re.compile(
    r"(?:.*/)?torch\.rendezvous\.(.+)\.(\d+)/MASTER_(?:ADDR|PORT)", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that registered in one place.

    Attributes:
        prefix: Of their keys, numbers as ``*``.
        world_size: How many there should be.
        ranks: Those that registered.
    """

    prefix: str
    world_size: int
    ranks: tuple[RankInfo, ...]

    @property
    def hosts(self) -> dict[int, str]:
        """Where each of them is."""
        return {info.rank: info.host for info in self.ranks}


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierState:
    """A barrier, as its keys tell.

    Attributes:
        prefix: Of its keys.
        complete: The last one came.
        arrived: How many arrivals were counted.
        world_size: How many it is for, where that is known.
        finding: Who is missing, while it is in progress and where that can be known.
        first: When the first one came, in seconds since the epoch, where known.
        last: When the last one came, likewise.
        last_rank: Which one that was, likewise.
        last_host: And where it is.
    """

    prefix: str
    complete: bool
    arrived: int
    world_size: int | None = None
    finding: MissingReport | None = None
    first: float | None = None
    last: float | None = None
    last_rank: int | None = None
    last_host: str | None = None

    @property
    def short(self) -> bool:
        """Somebody has not come yet."""
        # All may have come though the last has not said so yet.
        return not self.complete and self.arrived != self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What a store says.

    Attributes:
        groups: The ranks that registered.
        waiting: The barriers in progress, the newest last.
        more_waiting: How many older ones are not complete, which were not read.
        abandoned: Those that timed out, in a job that went on.
        complete: The barriers that finished last, the newest last.
        more_complete: How many more there are.
        rendezvous: The state of each rendezvous by its run id, None where it cannot
            be read.
        workers: The address of the store of its workers, by run id, where they have
            one of their own.
        unread: Why stores of workers could not be read, by their addresses.
    """

    groups: tuple[Group, ...]
    waiting: tuple[BarrierState, ...]
    more_waiting: int
    abandoned: tuple[BarrierState, ...]
    complete: tuple[BarrierState, ...]
    more_complete: int
    rendezvous: "dict[str, RendezvousState | None]"
    workers: dict[str, str]
    unread: dict[str, str] = field(default_factory=dict)

    def running_workers(self) -> set[str]:
        """Give the addresses of the stores of workers whose job has not ended."""
        return {
            url
            for run_id, url in self.workers.items()
            if (state := self.rendezvous.get(run_id)) and not state.closed
        }

    def joined(self, workers: "JobState") -> "JobState":
        """Add what the store of its workers says."""
        return replace(
            self,
            groups=self.groups + workers.groups,
            waiting=self.waiting + workers.waiting,
            more_waiting=self.more_waiting + workers.more_waiting,
            abandoned=self.abandoned + workers.abandoned,
            complete=self.complete + workers.complete,
            more_complete=self.more_complete + workers.more_complete,
        )

    @classmethod
    def of(cls, snapshot: StoreSnapshot, run_id: str | None = None) -> "JobState":
        """Find out about the one job, or whatever is there."""
        found = [
            Group(
                prefix=prefix,
                world_size=rank_registry.latest_world_size(infos),
                ranks=tuple(infos),
            )
            for prefix, infos in rank_registry.read_groups(snapshot).items()
        ]
        others = [group for group in found if not _of_job(group, run_id)]
        groups = [group for group in found if _of_job(group, run_id)]
        waiting, complete = _barriers(snapshot.keys)
        latest_waiting, latest_complete = _latest(waiting), _latest(complete)

        def described(prefixes: Sequence[str]) -> tuple[BarrierState, ...]:
            read = (
                _barrier(snapshot, prefix, group)
                for prefix in prefixes
                if (group := _group_of(prefix, found)) not in others
                and snapshot.get(BarrierKeys(prefix).num_members).isdigit()
            )
            # Those whose time is not known first, in the order of their numbers.
            return tuple(sorted(read, key=lambda one: one.last or 0.0))

        unfinished = described(latest_waiting)
        latest = [*latest_waiting, *latest_complete] if unfinished else []
        past = AbandonedBarriers(snapshot, latest, lambda one: _group_of(one, found))
        left = tuple(one for one in unfinished if one.prefix in past)
        return cls(
            groups=tuple(groups),
            waiting=tuple(one for one in unfinished if one not in left),
            more_waiting=len(waiting) - len(latest_waiting),
            abandoned=left,
            complete=described(latest_complete),
            more_complete=len(complete) - len(latest_complete),
            rendezvous=_rendezvous(snapshot, run_id),
            workers=workers_of(snapshot),
        )


def _of_job(group: Group, run_id: str | None) -> bool:
    # Where nobody named the job, it may be this one.
    return run_id is None or any(info.run_id in (None, run_id) for info in group.ranks)


def wanted(keys: Sequence[str]) -> list[str]:
    """Choose what is worth reading, which is little of what a long job left."""
    there = set(keys)
    barriers = [prefix for some in _barriers(there) for prefix in _latest(some)]
    of_barriers = {
        key
        for one in map(BarrierKeys, barriers)
        for key in (
            one.num_members,
            one.last_member,
            one.ledger,
            one.missing_report,
            one.repeat_count,
            one.traceparent,
        )
    }
    return [
        key
        for key in keys
        if key in of_barriers
        or rank_registry.prefix_of(key) is not None
        or _RENDEZVOUS.fullmatch(key)
        or tells_of_workers(key)
    ]


def _barriers(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Find the prefixes of the barriers in progress, and of those that are complete."""
    there = keys if isinstance(keys, (set, frozenset)) else set(keys)
    prefixes = [key.removesuffix(_END) for key in there if key.endswith(_END)]
    complete = {one for one in prefixes if BarrierKeys(one).last_member in there}
    return [one for one in prefixes if one not in complete], list(complete)


def _latest(prefixes: Sequence[str], most: int = MAX_LEDGERS) -> list[str]:
    """Choose those with the highest numbers, of each family its share."""
    by_family: dict[str, list[str]] = {}
    for prefix in sorted(prefixes, key=_numbered):
        by_family.setdefault(families.fold(prefix), []).append(prefix)
    share = max(1, most // max(1, len(by_family)))
    chosen = [one for family in by_family.values() for one in family[-share:]]
    return sorted(chosen[-most:], key=_numbered)


def _numbered(prefix: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall("[0-9]{1,18}", prefix)], prefix


def _group_of(prefix: str, groups: Iterable[Group]) -> Group | None:
    """Find whose barrier it is: of those registered in the nearest place above it."""
    numberless = rank_registry.without_numbers(prefix)
    above = [group for group in groups if numberless.startswith(group.prefix)]
    return max(above, key=lambda group: len(group.prefix), default=None)


def _barrier(snapshot: StoreSnapshot, prefix: str, group: Group | None) -> BarrierState:
    keys = BarrierKeys(prefix)
    ledger = read_ledger(snapshot, keys)
    times, signed = ledger.times(), ledger.ranks()
    hosts = {} if group is None else group.hosts
    barrier = partial(
        BarrierState,
        prefix=prefix,
        arrived=snapshot.add(keys.num_members, 0),
        first=min(times, default=None),
        last=max(times, default=None),
    )
    if snapshot.check([keys.last_member]):
        last = LastArrival.from_bytes(snapshot.get(keys.last_member)).rank
        if last is None and signed:
            last = signed[-1]
        return barrier(
            complete=True,
            last_rank=last,
            last_host=None if last is None else hosts.get(last),
        )
    size, told = _size_and_names(snapshot, keys, group)
    if size is None:
        return barrier(complete=False)
    # Where a rank is, else where those who miss it say that it should be.
    named = chain(hosts.__getitem__, told.__getitem__, default_name)
    finding = MissingReport.from_arrivals(
        read_arrivals(snapshot, keys, size), size, named
    )
    return barrier(complete=False, world_size=size, finding=finding)


def _size_and_names(
    snapshot: StoreSnapshot, keys: BarrierKeys, group: Group | None
) -> tuple[int | None, dict[int, str]]:
    """Tell how many a barrier is for, and what those are called that were missing.

    Who waited there and looked has said so; else it is as many as registered, unless
    more than that came.
    """
    if snapshot.check([keys.missing_report]):
        told = MissingReport.from_bytes(snapshot.get(keys.missing_report), 0)
        if told is not None and told.arrived_count and not told.duplicate_ranks:
            size = told.arrived_count - told.unidentified_count + len(told.unseen_ranks)
            return size, dict(told.names)
    if group is None or snapshot.add(keys.num_members, 0) > group.world_size:
        return None, {}
    return group.world_size, {}


def _rendezvous(
    snapshot: StoreSnapshot, run_id: str | None
) -> "dict[str, RendezvousState | None]":
    found = {
        match[1]: snapshot.get(key)
        for key in snapshot.list_keys()
        if (match := _RENDEZVOUS.fullmatch(key))
    }
    written = {
        name: value
        for name, value in {**snapshot.beside, **found}.items()
        if run_id in (None, name)
    }
    if not written:
        return {}
    # Only where there is one: torch's half of the package takes a while.
    from tracedstore.rendezvous.state import parse_state  # noqa: PLC0415

    def state(value: bytes) -> "RendezvousState | None":
        try:
            return parse_state(b64decode(value, validate=True))
        except ValueError:
            return None

    return {name: state(value) for name, value in sorted(written.items())}


def tells_of_workers(key: str) -> bool:
    """Tell whether a key says where the workers of a job meet."""
    return _MASTER.fullmatch(key) is not None


def workers_of(snapshot: StoreSnapshot) -> dict[str, str]:
    """Give the addresses of the stores of workers, by run id."""
    rounds: dict[str, tuple[int, str]] = {}
    for key in snapshot.list_keys():
        if key.endswith("ADDR") and (found := _MASTER.fullmatch(key)):
            port = key.removesuffix("ADDR") + "PORT"
            if not snapshot.check([port]):
                continue
            host = snapshot.get(key).decode("utf-8", "replace")
            where = f"tcp://{host}:{snapshot.get(port).decode('utf-8', 'replace')}"
            latest = rounds.get(found[1], (-1, ""))
            rounds[found[1]] = max(latest, (int(found[2]), where))
    return {run_id: where for run_id, (_, where) in rounds.items()}
