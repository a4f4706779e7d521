"""The rank registry: who is who, written into the store by each rank once.

A scheduler's roster says where a rank *should* be; a rank that registered says where
it *is*. Reading never blocks on a rank that did not come.
"""

import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tracedstore.coordination.arrivals import all_keys, bisect, listing, side_connection
from tracedstore.coordination.decoders import Decoder
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.timeouts import run_with_timeout

# What the key of each rank begins with.
REGISTRY = "tracedstore/RANKS"
# Seconds that a store gets which may be gone.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank says of itself.

    Attributes:
        rank: Which it is.
        host: On which machine.
        pid: In which process.
        local_rank: Its rank on that machine, where known.
        world_size: How many ranks there are.
        run_id: Of which job, where known.
        metrics: The address of its metrics, where it serves them.
        answers: Where it says what it is doing, as host:port, where it does.
        started: When it registered, in seconds since the epoch.
    """

    rank: int
    host: str
    pid: int
    local_rank: int | None = None
    world_size: int
    run_id: str | None = None
    metrics: str | None = None
    answers: str | None = None
    started: float


# What this process has registered, by store and rank. Weak: a store that is gone needs
# no entry, and its address may be another's.
_registered: WeakKeyDictionary[Any, dict[int, RankInfo]] = WeakKeyDictionary()
# Where this process's metrics can be had.
_metrics: str | None = None


def register(
    store: Any, rank: int, world_size: int, answers: str | None = None
) -> None:
    """Write down who this is, once a store."""
    known = _registered.setdefault(store, {})
    if rank in known:
        return
    identity = ProcessIdentity.from_environment(os.environ)
    known[rank] = RankInfo(
        rank=rank,
        host=identity.host,
        pid=os.getpid(),
        local_rank=identity.local_rank,
        world_size=world_size,
        run_id=identity.run_id,
        answers=answers,
        started=time.time(),
    )
    _write(store, known[rank])


def serve_at(metrics: str | None) -> None:
    """Register with an address from now on, and where that was done before, anew."""
    global _metrics  # noqa: PLW0603 - a process has one
    _metrics = metrics
    if metrics is None:
        return
    for store, known in list(_registered.items()):
        run_with_timeout(_PATIENCE, partial(_write_all, store, list(known.values())))


def _write_all(store: Any, infos: list[RankInfo]) -> None:
    with side_connection(store) as free:
        for info in infos:
            _write(free, info)


def stores() -> list[tuple[Any, int]]:
    """List the stores this process registered in, with their world sizes."""
    return [
        (store, max(info.world_size for info in known.values()))
        for store, known in list(_registered.items())
        if known
    ]


def reset() -> None:
    """Register anew, as a forked child must, which is another process."""
    _registered.clear()


def _write(store: Any, info: RankInfo) -> None:
    # A key for each, not a list of all: who looks wants few of them, and to read two
    # megabytes for three names takes longer than to find out whose they are. On a
    # TCPStore nobody waits for an answer to this.
    store.set(_key(info.rank), json.dumps(asdict(replace(info, metrics=_metrics))))


def registered(store: Any, ranks: Iterable[int]) -> dict[int, RankInfo]:
    """Read what these ranks said of themselves; those that said nothing are left out.

    What is no entry is skipped. Where a rank registered twice, the later one counts.
    """
    entries = map(_read, _written(store, [_key(rank) for rank in ranks]))
    return {info.rank: info for info in entries if info is not None}


def everybody(store: Any) -> list[RankInfo]:
    """Read everybody who registered, wherever in the store that was."""
    return [info for group in groups(store).values() for info in group]


def groups(store: Any) -> dict[str, list[RankInfo]]:
    """Read everybody who registered, by the prefix of the keys they did it under.

    A job registers under the prefixes that its stores have, and anew with each
    restart; where prefixes differ only in a number, the later entry of a rank counts.
    Ranks that a job lost when it shrank are left out.
    """
    found: dict[str, dict[int, RankInfo]] = {}
    for key in sorted(all_keys(store)):
        prefix = prefix_of(key)
        info = None if prefix is None else _read(store.get(key))
        if prefix is None or info is None:
            continue
        group = found.setdefault(numberless(prefix), {})
        before = group.get(info.rank)
        if before is None or before.started <= info.started:
            group[info.rank] = info
    sizes = {prefix: size_of(group.values()) for prefix, group in found.items()}
    return {
        prefix: [info for info in group.values() if info.rank < sizes[prefix]]
        for prefix, group in found.items()
    }


def prefix_of(key: str) -> str | None:
    """Tell under which prefix a rank registered with this key; None if none did."""
    prefix, found, number = key.partition(f"{REGISTRY}/")
    return prefix if found and number.isdecimal() else None


def numberless(prefix: str) -> str:
    """Take the numbers out of a prefix, which restarts change."""
    return re.sub("[0-9]+", "*", prefix)


def size_of(group: Iterable[RankInfo]) -> int:
    """Tell how many ranks there are, as the one says that registered last."""
    return max(group, key=lambda info: info.started).world_size


def by_registry(store: Any, ranks: Iterable[int]) -> Decoder:
    """Make a decoder of what these ranks registered."""
    hosts = {rank: info.host for rank, info in registered(store, ranks).items()}
    return hosts.__getitem__


def _key(rank: int) -> str:
    return f"{REGISTRY}/{rank}"


def _written(store: Any, keys: list[str]) -> list[bytes]:
    """Read those of the keys that are there."""
    listed = listing(store)
    if listed is None:
        absent = set(bisect(lambda some: bool(store.check(list(some))), keys))
        there = [key for key in keys if key not in absent]
    else:
        there = [key for key in keys if key in listed]
    # Where a store has no multi_get of its own, torch makes it of get.
    found: list[bytes] = store.multi_get(there) if there else []
    return found


def _read(line: bytes) -> RankInfo | None:
    try:
        written = json.loads(line)
        if not (isinstance(written["rank"], int) and isinstance(written["host"], str)):
            return None
        known = {field.name for field in fields(RankInfo)}
        return RankInfo(**{key: written[key] for key in known & written.keys()})
    except (ValueError, TypeError, KeyError):
        return None
