"""Reads which ranks arrived at a barrier, in as few round trips as the store allows.

There are three ways, the best one first: one read of the ledger, if the store has
``append``; one listing of all keys, on an EtcdStore; else ``check`` on halved ranges of
ranks, about m·log2(N) round trips for m missing ranks of N. There is never one wait per
rank: that takes one timeout per missing rank, and reports a present rank as missing
when the store is slow.
"""

import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tracedstore.common.keys import key_text
from tracedstore.coordination.protocol import (
    BarrierKeys,
    Ledger,
    encode_arrival,
)

T = TypeVar("T")

# A check sends all its keys in one request; this bounds the size of a request.
_MAX_KEYS_PER_CHECK = 4096
# Checks for repeated ranks, one each: only after a restart, without a ledger.
_MAX_REPEAT_CHECKS = 256
# Reads of a barrier at which ranks arrive meanwhile.
_MAX_READS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The arrivals at a barrier, as far as its keys show.

    Attributes:
        arrived_count: Number of arrivals counted.
        unseen_ranks: Ranks without a recorded arrival, in order. They are missing, or
            among the unidentified arrivals.
        duplicate_ranks: Ranks that arrived more than once.
        unidentified_count: Arrivals without a rank: mostly plain torch ranks.
        uncounted_ranks: Unseen ranks that recorded an arrival but were not counted:
            they stopped while arriving.
    """

    arrived_count: int
    unseen_ranks: tuple[int, ...]
    duplicate_ranks: tuple[int, ...]
    unidentified_count: int
    uncounted_ranks: tuple[int, ...] = ()


def record_arrival(store: Any, keys: BarrierKeys, rank: int) -> bool:
    """Record the arrival of a rank; return whether that went into the ledger."""
    if store.has_extended_api():
        # A TCPStore sends no reply to an append.
        store.append(keys.ledger, encode_arrival(rank, time.time()))
        return True
    # torch only checks whether the TRACE key exists, so it can be a counter.
    if store.add(keys.trace(rank), 1) > 1:
        store.add(keys.repeat_count, 1)
        store.set(keys.repeated(rank), "")
    return False


def confirm_arrival(store: Any, keys: BarrierKeys, rank: int) -> None:
    """Record that a rank was counted; at its timeout, when others read the arrivals."""
    if store.has_extended_api():
        store.append(keys.confirmations, encode_arrival(rank, time.time()))
    else:
        store.set(keys.counted(rank), "")


def read_arrivals(
    store: Any, keys: BarrierKeys, world_size: int, *, reads: int = _MAX_READS
) -> Arrivals:
    """Read which ranks arrived. Does not block and changes nothing.

    A rank records its arrival before it is counted. One that dies between the two is
    recorded, and the barrier waits for it. So the two are compared: if more arrivals
    are recorded than counted, only ranks that confirmed theirs are certain.

    Args:
        store: The store to read from.
        keys: The keys of the barrier.
        world_size: The number of ranks.
        reads: How often to read, if ranks are counted meanwhile.
    """
    # The count is read before the ledger: a rank that arrives between the two reads is
    # identified and not counted, instead of counted and reported missing.
    count: int = store.add(keys.num_members, 0)
    ledger = read_ledger(store, keys)
    recorded = ledger.ranks()
    unseen = set(range(world_size)).difference(recorded)
    repeats = len(recorded) - (world_size - len(unseen))
    arrivals = Counter(recorded) if repeats > 0 else Counter[int]()
    duplicates = [rank for rank, times in arrivals.items() if times > 1]
    if count > len(recorded):
        # Some arrivals are not in the ledger: plain torch ranks, or there is none.
        unseen -= _with_key(store, keys.trace, sorted(unseen))
    if not ledger.entries and store.check([keys.repeat_count]):
        repeats += int(store.get(keys.repeat_count))
        seen = [rank for rank in range(world_size) if rank not in unseen]
        duplicates += [
            rank
            for rank in seen[:_MAX_REPEAT_CHECKS]
            if store.check([keys.repeated(rank)])
        ]
    surplus = world_size - len(unseen) + repeats - count
    if surplus >= 0 and reads > 1 and store.add(keys.num_members, 0) != count:
        # Ranks were counted since. The new count is not comparable with the old
        # ledger: it may include a rank that was recorded after it was read. Nor is the
        # old one: a rank that was recorded and not yet counted stands for a plain torch
        # rank that was.
        return read_arrivals(store, keys, world_size, reads=reads - 1)
    uncounted: set[int] = set()
    if surplus > 0:
        seen_ranks = sorted(set(range(world_size)) - unseen)
        uncounted = set(seen_ranks) - _confirmed(store, keys, seen_ranks)
        unseen |= uncounted
    unidentified = max(0, count - (world_size - len(unseen)) - repeats)
    return Arrivals(
        arrived_count=count,
        unseen_ranks=tuple(sorted(unseen)),
        duplicate_ranks=tuple(sorted(duplicates)),
        unidentified_count=unidentified,
        uncounted_ranks=() if unidentified else tuple(sorted(uncounted)),
    )


def read_key(store: Any, key: str) -> bytes:
    """Read a key that exists, in one round trip if the store allows it.

    A TCPStore's ``get`` takes two: it waits for the key, then reads it.
    """
    # compare_set with equal expected and desired values reads the key in one round
    # trip and never changes it.
    one_round_trip = store.has_extended_api()
    value: bytes = store.compare_set(key, "", "") if one_round_trip else store.get(key)
    return value


def read_ledger(store: Any, keys: BarrierKeys, *, exists: bool = False) -> Ledger:
    """Read the ledger of a barrier; it is empty if there is none.

    Args:
        store: The store to read from.
        keys: The keys of the barrier.
        exists: Skip the check: the caller has written to the ledger.
    """
    exists = exists or store.check([keys.ledger])
    return Ledger(read_key(store, keys.ledger)) if exists else Ledger()


def has_duplicates(store: Any, keys: BarrierKeys, ledger: Ledger) -> bool:
    """Return whether a rank arrived more than once, in at most one round trip."""
    if ledger.entries:
        ranks = ledger.ranks()
        return len(set(ranks)) < len(ranks)
    return bool(store.check([keys.repeat_count]))


def _confirmed(store: Any, keys: BarrierKeys, ranks: Sequence[int]) -> set[int]:
    """Return the ranks that confirmed that they were counted."""
    if store.check([keys.confirmations]):
        return set(Ledger(read_key(store, keys.confirmations)).ranks())
    if store.has_extended_api():
        return set()
    return _with_key(store, keys.counted, ranks)


def _with_key(
    store: Any, key_of: Callable[[int], str], ranks: Sequence[int]
) -> set[int]:
    """Return the ranks whose key exists."""
    existing = etcd_keys(store)
    if existing is not None:
        return {rank for rank in ranks if key_of(rank) in existing}

    def all_exist(some: Sequence[int]) -> bool:
        return bool(store.check([key_of(rank) for rank in some]))

    absent = find_absent(all_exist, ranks)
    return set(ranks).difference(absent)


def find_absent(
    all_present: Callable[[Sequence[T]], bool], items: Sequence[T]
) -> list[T]:
    """Find the absent items by bisection, in order.

    Args:
        all_present: Returns whether all of the given items are present.
        items: The items to search.
    """
    absent: list[T] = []
    # Depth first from the left, so that the result is in order.
    pending = [
        items[start : start + _MAX_KEYS_PER_CHECK]
        for start in range(0, len(items), _MAX_KEYS_PER_CHECK)
    ][::-1]
    while pending:
        some = pending.pop()
        if all_present(some):
            continue
        if len(some) == 1:
            absent.append(some[0])
            continue
        half = len(some) // 2
        pending += [some[half:], some[:half]]
    return absent


def absent_keys(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that do not exist, in order, in few requests."""
    in_etcd = etcd_keys(store)
    if in_etcd is not None:
        return [key for key in keys if key not in in_etcd]
    return find_absent(lambda some: bool(store.check(list(some))), keys)


def etcd_keys(store: Any) -> frozenset[str] | None:
    """List the keys of an EtcdStore in one request; None for other stores.

    Each ``check`` of an EtcdStore reads its whole directory anyway. On the other
    stores a listing costs no less than the checks it replaces, and the listing of a
    PrefixStore includes keys outside its prefix.
    """
    contents = etcd_contents(store)
    return None if contents is None else frozenset(contents.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdContents:
    """The contents of an EtcdStore.

    Attributes:
        items: Its keys and values.
        invalid_keys: Keys that no Store has written, as they are in etcd: the key is
            not the base64 of a text, or its value is not base64.
    """

    items: dict[str, bytes]
    invalid_keys: tuple[str, ...]


def etcd_contents(store: Any, *, missing_ok: bool = True) -> EtcdContents | None:
    """Read all keys and values of an EtcdStore in one request; None for others.

    Args:
        store: The store.
        missing_ok: A directory that does not exist has no keys; else etcd's exception
            is raised.
    """
    state = getattr(store, "_traced", None)
    inner = store if state is None else state.inner
    if type(inner).__name__ != "EtcdStore" or not hasattr(inner, "client"):
        return None
    try:
        nodes: Iterable[Any] = inner.client.get(key=inner.prefix).children
    except Exception as error:
        if missing_ok and type(error).__name__ == "EtcdKeyNotFound":
            return EtcdContents(items={}, invalid_keys=())  # nothing was written yet
        raise
    items: dict[str, bytes] = {}
    invalid: list[str] = []
    for node in nodes:
        if node.dir:
            continue
        encoded = node.key.removeprefix(inner.prefix)
        try:
            key = b64decode(encoded, validate=True).decode()
            items[key] = b64decode(node.value, validate=True)
        except (ValueError, TypeError):  # TypeError: no value
            invalid.append(key_text(encoded))
    return EtcdContents(items=items, invalid_keys=tuple(invalid))


def list_keys(store: Any) -> Iterable[str]:
    """List all keys of a store, in one request and without blocking."""
    in_etcd = etcd_keys(store)
    keys: Iterable[str] = store.list_keys() if in_etcd is None else in_etcd
    return keys


def read_existing(store: Any, keys: list[str]) -> list[bytes]:
    """Read the values of the keys that exist."""
    return list(read_items(store, keys).values())


def read_items(store: Any, keys: Sequence[str]) -> dict[str, bytes]:
    """Read the keys that exist, with their values."""
    absent = set(absent_keys(store, keys))
    existing = [key for key in keys if key not in absent]
    # torch implements multi_get with get for stores that have none.
    values: list[bytes] = store.multi_get(existing) if existing else []
    return dict(zip(existing, values, strict=True))
