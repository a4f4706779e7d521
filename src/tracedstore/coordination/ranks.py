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
from typing import Any
from weakref import WeakKeyDictionary

from tracedstore.coordination.decoders import Decoder
from tracedstore.coordination.missing import all_keys, beside, listing
from tracedstore.core.identity import ProcessIdentity

# One line a rank, appended; or one key a rank, where a store cannot append.
REGISTRY = "tracedstore/RANKS"
_RANK = re.compile(rb'\{"rank": ([0-9]{1,18}),')
# Ranks that are looked up one by one, where there is no other way.
_MOST_LOOKED_UP = 256


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
        with beside(store) as free:
            for info in known.values():
                _write(free, info)


def stores() -> list[tuple[Any, int]]:
    """List the stores this process registered in, with their world sizes."""
    return [
        (store, max(info.world_size for info in known.values()))
        for store, known in list(_registered.items())
        if known
    ]


def forget() -> None:
    """Register anew, as a forked child must, which is another process."""
    _registered.clear()


def _write(store: Any, info: RankInfo) -> None:
    line = json.dumps(asdict(replace(info, metrics=_metrics)))
    if store.has_extended_api():
        store.append(REGISTRY, line + "\n")
    else:
        store.set(f"{REGISTRY}/{info.rank}", line)


def registered(store: Any, ranks: Iterable[int]) -> dict[int, RankInfo]:
    """Read what these ranks said of themselves; those that said nothing are left out.

    What is no entry is skipped. Where a rank registered twice, the later one counts.
    """
    wanted = set(ranks)
    entries: dict[int, RankInfo] = {}
    for line in _lines(store, wanted):
        # The registry of a large job has many lines, of which few are wanted.
        named = _RANK.match(line)
        info = _read(line) if named and int(named[1]) in wanted else None
        if info is not None:
            entries[info.rank] = info
    return entries


def everybody(store: Any) -> list[RankInfo]:
    """Read everybody who registered, wherever in the store that was.

    A job registers under the prefixes that its stores have, and anew with each
    restart; where prefixes differ only in a number, the later entry of a rank counts.
    Ranks that a job lost when it shrank are left out.
    """
    groups: dict[str, dict[int, RankInfo]] = {}
    for key in sorted(all_keys(store)):
        prefix, found, rest = key.partition(REGISTRY)
        if not found or (rest and not rest.removeprefix("/").isdecimal()):
            continue
        group = groups.setdefault(re.sub("[0-9]+", "*", prefix), {})
        for info in map(_read, store.get(key).splitlines()):
            if info is not None:
                before = group.get(info.rank)
                if before is None or before.started <= info.started:
                    group[info.rank] = info
    return [
        info
        for group in groups.values()
        for info in group.values()
        if info.rank < max(group.values(), key=lambda one: one.started).world_size
    ]


def by_registry(store: Any, ranks: Iterable[int]) -> Decoder:
    """Make a decoder of what these ranks registered."""
    hosts = {rank: info.host for rank, info in registered(store, ranks).items()}
    return hosts.__getitem__


def _lines(store: Any, ranks: set[int]) -> list[bytes]:
    if store.has_extended_api():
        if not store.check([REGISTRY]):
            return []
        lines: list[bytes] = store.get(REGISTRY).splitlines()
        return lines
    keys = [f"{REGISTRY}/{rank}" for rank in sorted(ranks)]
    listed = listing(store)
    if listed is None:
        there = [key for key in keys[:_MOST_LOOKED_UP] if store.check([key])]
    else:
        there = [key for key in keys if key in listed]
    return [store.get(key) for key in there]


def _read(line: bytes) -> RankInfo | None:
    try:
        written = json.loads(line)
        if not (isinstance(written["rank"], int) and isinstance(written["host"], str)):
            return None
        known = {field.name for field in fields(RankInfo)}
        return RankInfo(**{key: written[key] for key in known & written.keys()})
    except (ValueError, TypeError, KeyError):
        return None
