"""The rank registry: each rank writes its host, pid and addresses into the store.

A scheduler's roster has the host on which a rank *should* run; the registry has the
host on which it *does* run. Reading never waits for a rank that has not registered.

torchrun's agents do not register: their ranks in the store that they share are known to
their own processes only.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any
from weakref import ref

from tracedstore.common import codec, procfs
from tracedstore.common.codec import (
    LATER,
    HttpUrl,
    Large,
    Pid,
    Rank,
    Seconds,
    Small,
    Text,
)
from tracedstore.common.identity import ProcessIdentity, number, restart_count
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.signal_safety import calling_thread
from tracedstore.common.threads import run_with_timeout
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination.store_access import (
    list_keys,
    read_existing,
    side_connection,
)
from tracedstore.naming.decoders import Decoder
from tracedstore.recording.counters import handle_of, store_of
from tracedstore.recording.telemetry import TELEMETRY

# The key of a rank is this, a slash, and the rank.
REGISTRY = "tracedstore/RANKS"
# Seconds for writing to a store whose server may not respond.
_WRITE_TIMEOUT = 5.0
# An entry has about 200 bytes; four texts of 1024 characters may be escaped in JSON.
_MAX_ENTRY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank has registered.

    Ranks and world sizes are at most a million, and texts have at most 1024 characters.

    Attributes:
        rank: The rank.
        host: Its host name.
        pid: Its process id.
        local_rank: Its rank on that host, if known.
        world_size: The number of ranks.
        run_id: The run id of the job, if known.
        metrics: The URL of its metrics, if they are served.
        agent: The pid of torchrun's agent, if that serves them for its node.
        node: The group rank of its agent, if torchrun started it.
        started: When it registered, in seconds since the epoch.
        attempt: The attempt of torchrun that it belongs to, 0 without torchrun.
        start_ticks: When its process started, in ticks since the boot of its host.
        namespace: Its pid namespace (`common.procfs.own_namespace`). With the pid and
            the start time it identifies the process.
    """

    rank: Rank
    host: Text
    pid: Pid
    local_rank: Small | None = None
    world_size: Annotated[int, codec.below(MAX_RANKS + 1)]
    run_id: Text | None = None
    metrics: HttpUrl | None = None
    agent: Pid | None = None
    node: Small | None = None
    started: Seconds
    attempt: Annotated[Small, LATER] = 0
    start_ticks: Large | None = None
    namespace: Text | None = None


# What this process has registered, by the handle of a store
# (`recording.counters.handle_of`) and rank. Weak, because the address of a store that
# was freed may be used for another one.
_registered: WeakTable[dict[int, RankInfo]] = WeakTable()
# The thread that registered each of them: ranks may be threads of one process.
_threads: WeakTable[dict[int, int]] = WeakTable()
# The store (a weak reference) and the rank that `is_registered` last answered for with
# yes. Every barrier asks, mostly for the same, and this spares it two lookups. At first
# it is a function that returns no store.
_last_seen: tuple[Callable[[], Any], int] = (lambda: _last_seen, -1)
# The URL of this process's metrics, and the agent that serves them.
_metrics: str | None = None
_agent: int | None = None


def register(
    store: Any,
    rank: int,
    world_size: int,
    *,
    connection: Any = None,
    check: Callable[[Any, int, int], object] | None = None,
) -> None:
    """Register a rank of this process in a store, once per store.

    The thread that creates a group and the diagnosis may come at the same time. The
    first one checks and registers.

    Args:
        store: The store, or its handle.
        rank: The rank.
        world_size: The number of ranks.
        connection: A connection to write through, instead of the store itself.
        check: Looks at the entry of an earlier process before it is overwritten. It is
            called with the connection, the rank and the number of ranks.
    """
    handle = handle_of(store)
    known = _registered.setdefault(handle, {})
    if rank in known:
        return
    # One step, which two threads do not interleave.
    entry = own_entry(rank, world_size)
    if known.setdefault(rank, entry) is not entry:
        return
    _threads.setdefault(handle, {})[rank] = calling_thread()
    # What is registered can be asked from now on.
    TELEMETRY.rank_registers()
    used = store if connection is None else connection
    try:
        if check is not None:
            check(used, rank, world_size)
    finally:
        _write(used, entry)


def is_registered(store: Any, rank: int) -> bool:
    """Return whether this process has registered a rank in a store."""
    global _last_seen  # noqa: PLW0603 - one per process
    last, last_rank = _last_seen
    if last() is store and last_rank == rank:
        return True
    known = _registered.get(handle_of(store))
    if known is None or rank not in known:
        return False
    _last_seen = ref(store), rank
    return True


def register_early(store: Any, rank: int, world_size: int) -> None:
    """Write the entry of a rank through a connection that is not the job's.

    For a rank that is still in the constructor of its store. `register` writes the
    entry again.
    """
    _write(store, own_entry(rank, world_size))


def own_entry(rank: int, world_size: int) -> RankInfo:
    """Return what this process registers as a rank."""
    identity = ProcessIdentity.from_environment(os.environ)
    return RankInfo(
        rank=rank,
        host=identity.host,
        pid=os.getpid(),
        local_rank=identity.local_rank,
        world_size=world_size,
        run_id=identity.run_id,
        node=number(os.environ.get("GROUP_RANK")),
        started=time.time(),
        attempt=restart_count(os.environ),
        start_ticks=procfs.own_start_ticks(),
        namespace=procfs.own_namespace(),
    )


def set_metrics_address(metrics: str | None, agent: int | None = None) -> None:
    """Set the metrics URL to register, and update what is registered already.

    Args:
        metrics: The URL, None without one.
        agent: The pid of the agent that serves it; None if this process does.
    """
    global _metrics, _agent
    _metrics, _agent = metrics, agent
    if metrics is None:
        return
    for handle, known in _registered.items():
        run_with_timeout(
            _WRITE_TIMEOUT, partial(_write_all, handle, list(known.values()))
        )


def _write_all(handle: Any, infos: list[RankInfo]) -> None:
    store = store_of(handle)
    if store is None:
        return
    with side_connection(store) as connection:
        for info in infos:
            _write(connection, info)


def registered_stores() -> list[tuple[Any, int]]:
    """List the handles of the stores in which this process has registered.

    Each has the world size with it.
    """
    return [
        (handle, max(info.world_size for info in list(known.values())))
        for handle, known in registrations()
        if store_of(handle) is not None
    ]


def registrations() -> list[tuple[Any, dict[int, RankInfo]]]:
    """List the handles of the stores in which this process has registered.

    Each has the ranks with it.
    """
    return [(handle, known) for handle, known in _registered.items() if known]


def rank_of_thread(handle: Any, thread_id: int) -> int | None:
    """Return the rank that a thread of this process has in a store, if it is known."""
    ranks = dict(_threads.get(handle) or {})
    if len(ranks) == 1:
        return next(iter(ranks))
    return next((rank for rank, thread in ranks.items() if thread == thread_id), None)


def registered_threads() -> set[int]:
    """Return the threads of this process that have registered a rank."""
    return {thread for _, ranks in _threads.items() for thread in list(ranks.values())}


def reset() -> None:
    """Forget what is registered; a forked child is another process.

    It serves no metrics either.
    """
    global _metrics, _agent, _last_seen  # noqa: PLW0603 - one per process
    _metrics = _agent = None
    _last_seen = (lambda: _last_seen, -1)
    _registered.clear()
    _threads.clear()


def _write(store: Any, info: RankInfo) -> None:
    # One key per rank instead of one list: a reader needs few of them, and reading two
    # megabytes for three names takes longer than finding out which ranks are missing.
    # A TCPStore sends no reply to a set.
    entry = replace(info, metrics=_metrics, agent=_agent)
    store.set(_key(info.rank), codec.encode(entry))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Registered ranks of a store.

    Attributes:
        groups: The ranks, by the prefix of their keys. If a rank has registered twice,
            the later entry.
        invalid_count: The number of entries that are not valid.
        byte_count: The length of the entries that were read.
    """

    groups: dict[str, list[RankInfo]]
    invalid_count: int
    byte_count: int = 0

    def ranks(self) -> list[RankInfo]:
        """Return the ranks of all groups."""
        return [info for group in self.groups.values() for info in group]


def read_entries(store: Any, ranks: Iterable[int]) -> Registry:
    """Read the entries of these ranks, which have no prefix."""
    values = read_existing(store, [_key(rank) for rank in ranks])
    entries = list(map(parse_entry, values))
    found = {info.rank: info for info in entries if info is not None}
    return Registry(
        groups={"": list(found.values())},
        invalid_count=entries.count(None),
        byte_count=sum(map(len, values)),
    )


def read_ranks(store: Any, ranks: Iterable[int]) -> dict[int, RankInfo]:
    """Read the valid entries of these ranks; ranks without one are omitted."""
    return {info.rank: info for info in read_entries(store, ranks).ranks()}


def registered_ranks(store: Any, world_size: int) -> set[int]:
    """Return the ranks with an entry, in one request."""
    numbers = (
        key.rpartition("/")[2] for key in list_keys(store) if prefix_of(key) == ""
    )
    found = (int(number) for number in numbers if len(number) < len(str(MAX_RANKS)))
    return {rank for rank in found if rank < world_size}


def read_registry(store: Any) -> Registry:
    """Read all registered ranks, grouped by the prefix of their keys.

    A job registers under the prefixes of its stores, and again after each restart.
    Prefixes that differ only in numbers are one group, in which the latest entry of a
    rank counts. Ranks beyond the latest world size are omitted: the job has shrunk.
    """
    groups: dict[str, dict[int, RankInfo]] = {}
    invalid = 0
    for key in sorted(list_keys(store)):
        prefix = prefix_of(key)
        if prefix is None:
            continue
        info = parse_entry(store.get(key))
        if info is None:
            invalid += 1
            continue
        group = groups.setdefault(without_numbers(prefix), {})
        before = group.get(info.rank)
        if before is None or before.started <= info.started:
            group[info.rank] = info
    sizes = {
        prefix: latest_world_size(group.values()) for prefix, group in groups.items()
    }
    return Registry(
        groups={
            prefix: [info for info in group.values() if info.rank < sizes[prefix]]
            for prefix, group in groups.items()
        },
        invalid_count=invalid,
    )


def prefix_of(key: str) -> str | None:
    """Return the prefix of a registry key; None for other keys."""
    prefix, separator, number = key.partition(f"{REGISTRY}/")
    return prefix if separator and number.isdecimal() else None


def without_numbers(prefix: str) -> str:
    """Replace the numbers in a prefix with ``*``, because restarts change them."""
    return re.sub("[0-9]+", "*", prefix)


def latest_world_size(group: Iterable[RankInfo]) -> int:
    """Return the world size of the rank that registered last."""
    return max(group, key=lambda info: info.started).world_size


def registry_decoder(store: Any, ranks: Iterable[int]) -> Decoder:
    """Return a decoder with the hosts that these ranks have registered."""
    hosts = {rank: info.host for rank, info in read_ranks(store, ranks).items()}
    return hosts.__getitem__


def _key(rank: int) -> str:
    return f"{REGISTRY}/{rank}"


def parse_entry(value: bytes) -> RankInfo | None:
    """Parse a registry entry; None if a field is missing, malformed or out of bounds.

    Fields with other names are ignored: a later version may have written them.
    """
    info = codec.decode(RankInfo, value, _MAX_ENTRY_BYTES)
    return info if info is not None and is_valid(info) else None


def is_valid(info: RankInfo) -> bool:
    """Return whether a rank is one of its world."""
    return info.rank < info.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of this process in a store.

    Attributes:
        rank: The rank.
        world_size: The number of ranks that share the store.
        host_of: Returns the host on which a rank should run, "" if it is unknown.
        agents: The host and the process id of each of torchrun's agents, if the ranks
            are theirs; else None.
    """

    rank: int
    world_size: int
    host_of: Callable[[int], str]
    agents: Mapping[int, tuple[str, int]] | None = None


# The agents' ranks of this process, by handle.
_agents: WeakTable[Member] = WeakTable()


def record_agent(store: Any, member: Member) -> None:
    """Record the rank that this process has as an agent of torchrun in a store.

    torch's agents call their barriers without a rank. The rendezvous handler that
    returned their store knows it. Agents do not register: the ranks of the registry are
    those of the workers.
    """
    _agents.set(handle_of(store), member)


def agent_in(store: Any) -> Member | None:
    """Return the rank of this process as an agent in a store, None if it has none."""
    return _agents.get(handle_of(store))


def recorded_agents() -> list[tuple[Any, Member]]:
    """List the handles of the stores in which this process is an agent."""
    return _agents.items()
