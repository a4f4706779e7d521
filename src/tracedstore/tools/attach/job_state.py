"""The state of a job as the keys of its store record it."""

import re
from array import array
from base64 import b64decode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tracedstore.common import keys as families
from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.text import host_port
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    MissingReport,
    last_rank,
    read_arrivals,
    read_ledger,
)
from tracedstore.coordination.rank_registry import (
    RankInfo,
    latest_world_size,
    prefix_of,
    read_registry,
    without_numbers,
)
from tracedstore.diagnosis.observe.movement import StillRecord
from tracedstore.naming.decoders import chain, default_name
from tracedstore.tools.attach.stall_records import (
    StallRecord,
    StoredStalls,
    is_stall_key,
    is_still_key,
    read_still,
)
from tracedstore.tools.attach.store_snapshot import StoreSnapshot
from tracedstore.tools.job_view import BarrierView

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import RendezvousState

# Maximum number of ledgers read of incomplete barriers, and of complete ones. Barriers
# never delete their keys, so a long job has many thousands.
MAX_LEDGERS = 64
# torch keeps the state of a rendezvous under torch.rendezvous.<run_id>. The agents of
# round N use keys under torch.rendezvous.<run_id>.<N>/, among them the address of the
# store that they made for their workers.
_RENDEZVOUS = re.compile(r"(?:.*/)?torch\.rendezvous\.((?:(?!\.\d+/).)+)", re.DOTALL)
_WORKER_STORE = re.compile(
    r"(?:.*/)?torch\.rendezvous\.(.+)\.([0-9]{1,18})/MASTER_(?:ADDR|PORT)", re.DOTALL
)
# Where torchrun's agents meet. Their numbers are not those of the workers' ranks.
_OF_AGENTS = "torchelastic/agent/"
# The expressions above take the square of the length on some keys.
_MAX_RENDEZVOUS_KEY = 1024
# A name or an address, of IPv6 without brackets.
_HOST = re.compile(rb"[0-9A-Za-z._:%-]{1,253}")
# Maximum size of a ledger; 98,304 ranks have 1.2 MB.
_MAX_LEDGER_BYTES = 4 * 1024 * 1024
# Maximum size of all rendezvous states, in base64. Parsing so much takes up to 4 s.
_MAX_RENDEZVOUS_BYTES = 8 * 1024 * 1024
# The fields of a state that each store has.
_OF_A_STORE = (
    *("groups", "in_progress", "abandoned", "finished", "stalls", "still"),
    *("unread_in_progress", "unread_finished", "unread_ledgers", "unread_records"),
    *("unreadable_barriers", "invalid_entries", "invalid_records", "invalid_keys"),
)


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
        still: The ranks in which nothing moves.
        invalid_records: The number of verdicts and records of blocked ranks that are
            not valid.
        unread_records: The number of records of blocked ranks that were not read.
        invalid_keys: Keys of an etcd that no Store has written.
    """

    groups: tuple[Group, ...]
    in_progress: tuple[BarrierView, ...]
    unread_in_progress: int
    abandoned: tuple[BarrierView, ...]
    finished: tuple[BarrierView, ...]
    unread_finished: int
    rendezvous: "dict[str, RendezvousState | None]"
    worker_stores: dict[str, str | None]
    unreadable_stores: dict[str, str] = field(default_factory=dict)
    unreadable_barriers: tuple[str, ...] = ()
    unread_ledgers: int = 0
    invalid_entries: int = 0
    stalls: tuple[StallRecord, ...] = ()
    still: tuple[StillRecord, ...] = ()
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
        # Tuples are joined, and numbers are added.
        joined: dict[str, Any] = {
            name: getattr(self, name) + getattr(workers, name) for name in _OF_A_STORE
        }
        return replace(self, **joined)


def read_job_state(snapshot: StoreSnapshot, run_id: str | None = None) -> JobState:
    """Read the state of one job, or without a run id of everything in the store."""
    registry = read_registry(snapshot)
    all_groups = [
        Group(
            prefix=prefix,
            world_size=latest_world_size(infos),
            ranks=tuple(infos),
        )
        for prefix, infos in registry.groups.items()
    ]
    groups = [group for group in all_groups if _belongs_to(group, run_id)]
    other_groups = [group for group in all_groups if not _belongs_to(group, run_id)]
    incomplete, complete = _barriers(snapshot.keys)
    rendezvous = _read_rendezvous(snapshot, run_id)
    newest_incomplete, newest_complete = _newest(incomplete), _newest(complete)
    unreadable: list[str] = []
    without_ledger: list[str] = []

    def read_barriers(prefixes: Sequence[str]) -> tuple[BarrierView, ...]:
        barriers = []
        for prefix in prefixes:
            of_agents = _OF_AGENTS in prefix
            group = None if of_agents else _group_of(prefix, all_groups)
            if group in other_groups:
                continue
            keys = BarrierKeys(prefix)
            if not snapshot.unread_ledgers.isdisjoint(
                (keys.ledger, keys.confirmations)
            ):
                without_ledger.append(prefix)
                continue
            try:
                found = _read_barrier(snapshot, prefix, group)
                if of_agents:
                    found = _of_agents(found, rendezvous)
                barriers.append(found)
            except (ValueError, KeyError):  # KeyError: deleted after it was listed
                unreadable.append(prefix)
        # Barriers without a known time are first, ordered by their numbers.
        return tuple(sorted(barriers, key=lambda one: one.last or 0.0))

    unfinished = read_barriers(newest_incomplete)
    finished = read_barriers(newest_complete)
    read = (*unfinished, *finished) if unfinished else ()
    past = _abandoned(snapshot, read, all_groups)
    abandoned = tuple(
        replace(one, abandoned=True) for one in unfinished if one.prefix in past
    )
    stalls = StoredStalls(
        snapshot,
        {one.prefix: {info.rank: info for info in one.ranks} for one in all_groups},
    )
    others = {group.prefix for group in other_groups}
    return JobState(
        groups=tuple(groups),
        in_progress=tuple(one for one in unfinished if one.prefix not in past),
        unread_in_progress=len(incomplete) - len(newest_incomplete),
        abandoned=abandoned,
        finished=finished,
        unread_finished=len(complete) - len(newest_complete),
        rendezvous=rendezvous,
        worker_stores=worker_stores(snapshot),
        unreadable_barriers=tuple(unreadable),
        unread_ledgers=len(without_ledger),
        invalid_entries=registry.invalid_count,
        stalls=tuple(one for one in stalls.stalls if one.prefix not in others),
        still=tuple(read_still(snapshot, groups)),
        invalid_records=stalls.invalid_count,
        unread_records=stalls.unread_count,
        invalid_keys=snapshot.invalid_keys,
    )


def _belongs_to(group: Group, run_id: str | None) -> bool:
    # Ranks without a run id may belong to any job.
    return run_id is None or any(info.run_id in (None, run_id) for info in group.ranks)


def select_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys whose values are read, a small part of those of a long job."""
    present = set(keys)
    # The incomplete ones first, and the newest ones first: their ledgers are read
    # before the limit is reached.
    barriers = [
        BarrierKeys(prefix)
        for some in _barriers(present)
        for prefix in reversed(_newest(some))
    ]
    barrier_keys = {
        key
        for barrier in barriers
        for key in (
            barrier.num_members,
            barrier.last_member,
            barrier.missing_report,
            barrier.repeat_count,
        )
    }
    ledgers = [
        key
        for barrier in barriers
        for key in (barrier.ledger, barrier.confirmations)
        if key in present
    ]
    others = [
        key
        for key in keys
        if key in barrier_keys
        or prefix_of(key) is not None
        or _match_rendezvous(key)
        or is_worker_store_key(key)
        or is_stall_key(key)
        or is_still_key(key)
    ]
    return [*others, *ledgers]


def _barriers(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the prefixes of the incomplete barriers, and of the complete ones."""
    present = keys if isinstance(keys, (set, frozenset)) else set(keys)
    prefixes = [
        prefix for key in present if (prefix := BarrierKeys.prefix_of(key)) is not None
    ]
    complete = {
        prefix for prefix in prefixes if BarrierKeys(prefix).last_member in present
    }
    return [prefix for prefix in prefixes if prefix not in complete], list(complete)


def _newest(prefixes: Sequence[str], limit: int = MAX_LEDGERS) -> list[str]:
    """Return the prefixes with the highest numbers, the same share of each family."""
    by_family: dict[str, list[str]] = {}
    for prefix in sorted(prefixes, key=_numeric_order):
        by_family.setdefault(families.fold(prefix), []).append(prefix)
    share = max(1, limit // max(1, len(by_family)))
    newest = [prefix for family in by_family.values() for prefix in family[-share:]]
    return sorted(newest[-limit:], key=_numeric_order)


def _numeric_order(prefix: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall("[0-9]{1,18}", prefix)], prefix


def _group_of(prefix: str, groups: Iterable[Group]) -> Group | None:
    """Return the group whose key prefix is the longest prefix of the barrier's."""
    numberless = without_numbers(prefix)
    candidates = [group for group in groups if numberless.startswith(group.prefix)]
    return max(candidates, key=lambda group: len(group.prefix), default=None)


def _read_barrier(
    snapshot: StoreSnapshot, prefix: str, group: Group | None
) -> BarrierView:
    """Read a barrier.

    Raises:
        ValueError: A value is malformed, or too large.
        KeyError: A key was deleted after it was listed.
    """
    keys = BarrierKeys(prefix)
    ledger = read_ledger(snapshot, keys)
    times, ranks = _check_ledger(ledger)
    hosts = {} if group is None else group.hosts
    barrier = partial(
        BarrierView,
        prefix=prefix,
        arrived=snapshot.add(keys.num_members, 0),
        ranks=ranks,
        times=times,
        first=min(times, default=None),
        last=max(times, default=None),
        group=None if group is None else group.prefix,
    )
    if snapshot.check([keys.last_member]):
        last = last_rank(snapshot.get(keys.last_member))
        if last is None and ranks:
            last = ranks[-1]
        return barrier(
            complete=True,
            last_rank=last,
            last_host=None if last is None else hosts.get(last),
        )
    timed_out = _timed_out(snapshot, keys, group)
    world_size, names = _world_size_and_names(snapshot, keys, group)
    if world_size is None:
        return barrier(timed_out=timed_out)
    # The host that a rank registered, else the name that waiting ranks know it by.
    decoder = chain(hosts.__getitem__, names.__getitem__, default_name)
    report = read_arrivals(snapshot, keys, world_size).with_names(decoder)
    unfinished: BarrierView = barrier(
        timed_out=timed_out, world_size=world_size, report=report
    )
    if not unfinished.awaits_ranks:
        return unfinished
    if not times and not report.unidentified_count:
        # Without a ledger it is known who arrived, but not when.
        unfinished = replace(unfinished, ranks=report.arrived_ranks)
    return replace(
        unfinished, missing=report.describe(), missing_ranks=report.missing_ranks
    )


def _of_agents(
    barrier: BarrierView, rendezvous: "dict[str, RendezvousState | None]"
) -> BarrierView:
    """Return a barrier of agents: as many as the rendezvous has, if there is one."""
    states = [state for state in rendezvous.values() if state is not None]
    number = len(states[0].participants) if len(states) == 1 else None
    return replace(
        barrier, world_size=number, missing="", missing_ranks=(), of_agents=True
    )


def _timed_out(
    snapshot: StoreSnapshot, keys: BarrierKeys, group: Group | None
) -> frozenset[int]:
    """Return the ranks that recorded that they timed out."""
    if snapshot.check([keys.confirmations]):
        return frozenset(Ledger(snapshot.get(keys.confirmations)).ranks())
    # A store that cannot append has a key for each.
    ranks = () if group is None else (info.rank for info in group.ranks)
    return frozenset(rank for rank in ranks if snapshot.check([keys.counted(rank)]))


def _check_ledger(ledger: Ledger) -> tuple[Sequence[float], Sequence[int]]:
    """Return the times and ranks of a ledger; raise ValueError if one is absurd."""
    if len(ledger.entries) > _MAX_LEDGER_BYTES:
        raise ValueError(f"more than {_MAX_LEDGER_BYTES} bytes")
    times, ranks = array("d", ledger.times()), ledger.ranks()
    if len(times) != len(ranks) or max(ranks, default=0) >= MAX_RANKS:
        raise ValueError("a rank that is too high")
    for time in times:
        validation.seconds(time)
    return times, ranks


def _world_size_and_names(
    snapshot: StoreSnapshot, keys: BarrierKeys, group: Group | None
) -> tuple[int | None, dict[int, str]]:
    """Return the number of ranks a barrier waits for, and names of missing ranks.

    Both are in the report of a rank that waits there. Without a report the world size
    is that of the group, unless more ranks have arrived.
    """
    if snapshot.check([keys.missing_report]):
        report = MissingReport.from_bytes(snapshot.get(keys.missing_report), 0)
        if report is not None and report.arrived_count and not report.duplicate_ranks:
            identified = report.arrived_count - report.unidentified_count
            world_size = identified + len(report.unseen_ranks)
            if 0 < world_size <= MAX_RANKS:
                return world_size, dict(report.names)
    if group is None or snapshot.add(keys.num_members, 0) > group.world_size:
        return None, {}
    return group.world_size, {}


def _read_rendezvous(
    snapshot: StoreSnapshot, run_id: str | None
) -> "dict[str, RendezvousState | None]":
    in_store = {
        match[1]: snapshot.get(key)
        for key in snapshot.list_keys()
        if (match := _match_rendezvous(key))
    }
    states = {
        name: value
        for name, value in {**snapshot.etcd_rendezvous, **in_store}.items()
        if run_id in (None, name)
    }
    if not states:
        return {}
    # Imported only if needed: it imports torch's elastic modules, which takes a while.
    from tracedstore.rendezvous.state import parse_state  # noqa: PLC0415

    parsed: dict[str, RendezvousState | None] = dict.fromkeys(sorted(states))
    remaining = _MAX_RENDEZVOUS_BYTES
    # The smallest first, so that large values of other programs do not keep a state
    # from being read.
    for name, value in sorted(states.items(), key=lambda one: len(one[1])):
        remaining -= len(value)
        if remaining < 0:
            break
        with suppress(ValueError):
            parsed[name] = parse_state(b64decode(value, validate=True))
    return parsed


def _match_rendezvous(key: str) -> re.Match[str] | None:
    return _RENDEZVOUS.fullmatch(key) if len(key) <= _MAX_RENDEZVOUS_KEY else None


def is_worker_store_key(key: str) -> bool:
    """Return whether a key holds the address or port of a store for workers."""
    return len(key) <= _MAX_RENDEZVOUS_KEY and _WORKER_STORE.fullmatch(key) is not None


def worker_stores(snapshot: StoreSnapshot) -> dict[str, str | None]:
    """Return the URL of the worker store of each run id's latest round.

    It is None if the values are not a host and a port.
    """
    latest: dict[str, tuple[int, str | None]] = {}
    for key in snapshot.list_keys():
        if key.endswith("ADDR") and (match := _WORKER_STORE.fullmatch(key)):
            port = key.removesuffix("ADDR") + "PORT"
            if not snapshot.check([port]):
                continue
            url = _worker_store_url(snapshot.get(key), snapshot.get(port))
            run_id, number = match[1], int(match[2])
            if number > latest.get(run_id, (-1, None))[0]:
                latest[run_id] = number, url
    return {run_id: url for run_id, (_, url) in latest.items()}


def _worker_store_url(host: bytes, port: bytes) -> str | None:
    if not _HOST.fullmatch(host):
        return None
    name = host.decode("ascii")
    try:
        server = host_port(name, port[:6].decode())
        return f"tcp://{validation.host_and_port(server)}"
    except ValueError:
        return None


def _abandoned(
    snapshot: StoreSnapshot, barriers: Sequence[BarrierView], groups: Sequence[Group]
) -> set[str]:
    """Return the prefixes of the barriers that every rank there has given up.

    A barrier that timed out keeps its keys, and its job may have continued since. So
    each rank that arrived has arrived at another barrier since. Another thread may have
    done that: each must also have timed out here, or run in another process by now.
    Without a ledger that is unknown, because arrivals have no times.
    """
    arrivals = {
        one.prefix: dict(zip(one.ranks, one.times, strict=False)) for one in barriers
    }
    # By group, because rank numbers are unique within a group only.
    latest: dict[str | None, dict[int, float]] = {}
    for barrier in sorted(barriers, key=lambda one: one.last or 0.0):
        latest.setdefault(barrier.group, {}).update(arrivals[barrier.prefix])
    current = {group.prefix: group.ranks for group in groups}
    found = set()
    for barrier in barriers:
        times = arrivals[barrier.prefix]
        if barrier.complete or barrier.group is None or not times:
            continue
        # Of ranks that are counted and not in the ledger nothing is known.
        if barrier.arrived > len(barrier.ranks):
            continue
        later = latest[barrier.group]
        if any(later[rank] <= time for rank, time in times.items()):
            continue
        # A rank sets its TRACE key when it times out.
        trace = BarrierKeys(barrier.prefix).trace
        waiting = {rank for rank in times if not snapshot.check([trace(rank)])}
        ranks = current[barrier.group]
        if not waiting or waiting <= _restarted(snapshot, barrier.prefix, ranks):
            found.add(barrier.prefix)
    return found


def _restarted(
    snapshot: StoreSnapshot, barrier: str, current: Iterable[RankInfo]
) -> set[int]:
    """Return the ranks that run in another process than when a barrier began.

    A restarted job registers under a prefix with another number.
    """
    by_prefix: dict[str, list[str]] = {}
    for key in snapshot.list_keys():
        prefix = prefix_of(key)
        if prefix is not None and barrier.startswith(prefix):
            by_prefix.setdefault(prefix, []).append(key)
    keys = by_prefix[max(by_prefix, key=len)] if by_prefix else []
    entries = StoreSnapshot(keys, {key: snapshot.get(key) for key in keys})
    registered = {info.rank: info for info in read_registry(entries).ranks()}
    return {
        info.rank
        for info in current
        if (before := registered.get(info.rank))
        and (before.host, before.pid) != (info.host, info.pid)
    }
