"""Reads ranks, barriers, stalls and rendezvous from the keys of a job's store."""

import re
from base64 import b64decode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tracedstore.common import keys as families
from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.text import host_port
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    last_rank,
    read_arrivals,
    read_ledger,
)
from tracedstore.coordination.missing_report import MissingReport
from tracedstore.naming.decoders import chain, default_name
from tracedstore.tools.attach.abandoned import AbandonedBarriers
from tracedstore.tools.attach.job_state import BarrierState, Group, JobState
from tracedstore.tools.attach.stalled_ranks import is_stall_key, read_stalls
from tracedstore.tools.attach.store_contents import StoreSnapshot

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
# The expressions above take the square of the length on some keys.
_MAX_RENDEZVOUS_KEY = 1024
# A name or an address, of IPv6 without brackets.
_HOST = re.compile(rb"[0-9A-Za-z._:%-]{1,253}")
# Maximum size of a ledger; 98,304 ranks have 1.2 MB.
_MAX_LEDGER_BYTES = 4 * 1024 * 1024
# Maximum size of all rendezvous states, in base64. Parsing so much takes up to 4 s.
_MAX_RENDEZVOUS_BYTES = 8 * 1024 * 1024


def read_job_state(snapshot: StoreSnapshot, run_id: str | None = None) -> JobState:
    """Read the state of one job, or without a run id of everything in the store."""
    registry = rank_registry.read_registry(snapshot)
    all_groups = [
        Group(
            prefix=prefix,
            world_size=rank_registry.latest_world_size(infos),
            ranks=tuple(infos),
        )
        for prefix, infos in registry.groups.items()
    ]
    groups = [group for group in all_groups if _belongs_to(group, run_id)]
    other_groups = [group for group in all_groups if not _belongs_to(group, run_id)]
    incomplete, complete = _barriers(snapshot.keys)
    newest_incomplete, newest_complete = _newest(incomplete), _newest(complete)
    unreadable: list[str] = []
    without_ledger: list[str] = []

    def read_barriers(prefixes: Sequence[str]) -> tuple[BarrierState, ...]:
        barriers = []
        for prefix in prefixes:
            group = _group_of(prefix, all_groups)
            if group in other_groups:
                continue
            keys = BarrierKeys(prefix)
            if not snapshot.unread_ledgers.isdisjoint(
                (keys.ledger, keys.confirmations)
            ):
                without_ledger.append(prefix)
                continue
            try:
                barriers.append(_read_barrier(snapshot, prefix, group))
            except (ValueError, KeyError):  # KeyError: deleted after it was listed
                unreadable.append(prefix)
        # Barriers without a known time are first, ordered by their numbers.
        return tuple(sorted(barriers, key=lambda one: one.last_arrival or 0.0))

    unfinished = read_barriers(newest_incomplete)
    finished = read_barriers(newest_complete)
    read = [one.prefix for one in (*unfinished, *finished)]
    past = AbandonedBarriers(
        snapshot,
        read if unfinished else [],
        lambda prefix: _group_of(prefix, all_groups),
    )
    abandoned = tuple(one for one in unfinished if one.prefix in past)
    stalls = read_stalls(
        snapshot,
        {one.prefix: {info.rank: info for info in one.ranks} for one in all_groups},
    )
    others = {group.prefix for group in other_groups}
    return JobState(
        groups=tuple(groups),
        in_progress=tuple(one for one in unfinished if one not in abandoned),
        unread_in_progress=len(incomplete) - len(newest_incomplete),
        abandoned=abandoned,
        finished=finished,
        unread_finished=len(complete) - len(newest_complete),
        rendezvous=_read_rendezvous(snapshot, run_id),
        worker_stores=worker_stores(snapshot),
        unreadable_barriers=tuple(unreadable),
        unread_ledgers=len(without_ledger),
        invalid_entries=registry.invalid_count,
        stalls=tuple(one for one in stalls.stalls if one.prefix not in others),
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
        or rank_registry.prefix_of(key) is not None
        or _match_rendezvous(key)
        or is_worker_store_key(key)
        or is_stall_key(key)
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
    numberless = rank_registry.without_numbers(prefix)
    candidates = [group for group in groups if numberless.startswith(group.prefix)]
    return max(candidates, key=lambda group: len(group.prefix), default=None)


def _read_barrier(
    snapshot: StoreSnapshot, prefix: str, group: Group | None
) -> BarrierState:
    """Read a barrier.

    Raises:
        ValueError: A value is malformed, or too large.
        KeyError: A key was deleted after it was listed.
    """
    keys = BarrierKeys(prefix)
    ledger = read_ledger(snapshot, keys)
    times, signed = _check_ledger(ledger)
    hosts = {} if group is None else group.hosts
    barrier = partial(
        BarrierState,
        prefix=prefix,
        arrived=snapshot.add(keys.num_members, 0),
        first_arrival=min(times, default=None),
        last_arrival=max(times, default=None),
        ledger=ledger,
        group=None if group is None else group.prefix,
    )
    if snapshot.check([keys.last_member]):
        last = last_rank(snapshot.get(keys.last_member))
        if last is None and signed:
            last = signed[-1]
        return barrier(
            complete=True,
            last_rank=last,
            last_host=None if last is None else hosts.get(last),
        )
    timed_out = _timed_out(snapshot, keys, group)
    world_size, names = _world_size_and_names(snapshot, keys, group)
    if world_size is None:
        return barrier(complete=False, timed_out=timed_out)
    # The host that a rank registered, else the name that waiting ranks know it by.
    decoder = chain(hosts.__getitem__, names.__getitem__, default_name)
    report = read_arrivals(snapshot, keys, world_size).with_names(decoder)
    return barrier(
        complete=False,
        timed_out=timed_out,
        world_size=world_size,
        missing_report=report,
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
    times, ranks = ledger.times(), ledger.ranks()
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
