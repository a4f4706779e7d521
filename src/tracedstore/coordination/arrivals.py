"""Find out who arrived at a barrier, in as few round trips as the store allows.

Three ways, the best one first: one read of the ledger, where the store can append;
one listing of its keys, where that is what it offers; else halving ranges of ranks
with ``check``, about m·log2(N) round trips for m missing of N. Never one wait per
rank: that takes a timeout for each that is missing, and accuses a rank that is there
when the store is slow.
"""

import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tracedstore.coordination.protocol import Keys, Ledger, signature, spelled
from tracedstore.core.identity import bottom_of

T = TypeVar("T")

# A check has all its keys in one request; this keeps requests small.
_MOST_KEYS_A_CHECK = 4096
# Only after a restart on a store without a ledger.
_MOST_ASKED_ONE_BY_ONE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Who arrived, as far as that can be told.

    Attributes:
        count: How many arrivals were counted.
        missing: The ranks that nothing shows to have arrived, in order.
        duplicates: Ranks that arrived more than once.
        unidentified: Arrivals that no name belongs to: plain torch's, mostly.
        traceparent: The trace of the first to arrive, "" if it left none.
    """

    count: int
    missing: tuple[int, ...]
    duplicates: tuple[int, ...]
    unidentified: int
    traceparent: str = ""


def record_arrival(store: Any, keys: Keys, rank: int) -> bool:
    """Write down that a rank arrived, and tell whether that went into the ledger."""
    if store.has_extended_api():
        # On a TCPStore nobody waits for an answer to this.
        store.append(keys.ledger, signature(rank, time.time()))
        return True
    if store.add(keys.trace(rank), 1) > 1:
        # torch only asks whether that key is there, so it can count as well.
        store.add(keys.repeats, 1)
        store.set(keys.again(rank), "")
    return False


def read_arrivals(store: Any, keys: Keys, world_size: int) -> Arrivals:
    """Look who arrived. Blocks on nothing and changes nothing."""
    # The count first: who arrives between the two reads is then named and not
    # counted, instead of counted and accused.
    count: int = store.add(keys.num_members, 0)
    ledger = read_ledger(store, keys)
    signed = ledger.ranks()
    missing = set(range(world_size)).difference(signed)
    repeats = len(signed) - (world_size - len(missing))
    often = Counter(signed) if repeats > 0 else Counter[int]()
    twice = [rank for rank, times in often.items() if times > 1]
    if count > len(signed):
        # Somebody came without signing: plain torch's ranks, or there is no ledger.
        missing -= _traced(store, keys, sorted(missing))
    if not ledger.entries and store.check([keys.repeats]):
        repeats += int(store.get(keys.repeats))
        came = [rank for rank in range(world_size) if rank not in missing]
        some = came[:_MOST_ASKED_ONE_BY_ONE]
        twice += [rank for rank in some if store.check([keys.again(rank)])]
    named = world_size - len(missing)
    return Arrivals(
        count=count,
        missing=tuple(sorted(missing)),
        duplicates=tuple(sorted(twice)),
        unidentified=max(0, count - named - repeats),
        traceparent=leader(store, keys, ledger),
    )


def read(store: Any, key: str) -> bytes:
    """Read a key that is there, in one round trip where that can be had.

    A TCPStore's get takes two: it waits for the key, and then asks for it.
    """
    # The second changes nothing, because nothing is what it would change.
    one_trip = store.has_extended_api()
    found: bytes = store.compare_set(key, "", "") if one_trip else store.get(key)
    return found


def read_ledger(store: Any, keys: Keys, *, signed: bool = False) -> Ledger:
    """Read what those that arrived wrote, if anybody did.

    Args:
        store: Where to read it.
        keys: Of which barrier.
        signed: The caller did, so there is a ledger, and nobody has to ask.
    """
    there = signed or store.check([keys.ledger])
    return Ledger(read(store, keys.ledger)) if there else Ledger()


def duplicates(store: Any, keys: Keys, ledger: Ledger) -> bool:
    """Tell whether some rank did, in one round trip at most."""
    if ledger.entries:
        signed = ledger.ranks()
        return len(set(signed)) < len(signed)
    return bool(store.check([keys.repeats]))


def lead(store: Any, keys: Keys, traceparent: str) -> None:
    """Leave the trace of the first to arrive, for the others to join."""
    if store.has_extended_api():
        store.append(keys.ledger, spelled(traceparent))
    else:
        store.set(keys.traceparent, traceparent)


def leader(store: Any, keys: Keys, ledger: Ledger) -> str:
    """Find the trace of the first to arrive, "" if it left none."""
    if store.has_extended_api() or not store.check([keys.traceparent]):
        return ledger.traceparent()
    written: bytes = store.get(keys.traceparent)
    return written.decode("ascii", "replace")


def _traced(store: Any, keys: Keys, ranks: Sequence[int]) -> set[int]:
    """Find those of the ranks whose TRACE key is there."""
    listed = listing(store)
    if listed is not None:
        return {rank for rank in ranks if keys.trace(rank) in listed}
    absent = bisect(_checker(store, keys), ranks)
    return set(ranks) - set(absent)


def _checker(store: Any, keys: Keys) -> Callable[[Sequence[int]], bool]:
    def all_there(ranks: Sequence[int]) -> bool:
        return bool(store.check([keys.trace(rank) for rank in ranks]))

    return all_there


def bisect(all_there: Callable[[Sequence[T]], bool], ranks: Sequence[T]) -> list[T]:
    """Find the ranks that are not there by halving those that are not all there."""
    missing: list[T] = []
    # Depth first from the left, so that what is found is in order.
    pending = [
        ranks[start : start + _MOST_KEYS_A_CHECK]
        for start in range(0, len(ranks), _MOST_KEYS_A_CHECK)
    ][::-1]
    while pending:
        some = pending.pop()
        if all_there(some):
            continue
        if len(some) == 1:
            missing.append(some[0])
            continue
        half = len(some) // 2
        pending += [some[half:], some[:half]]
    return missing


def listing(store: Any) -> frozenset[str] | None:
    """List the keys of an EtcdStore, whose every check reads its whole directory.

    None for other stores: a listing of theirs is no cheaper than what it replaces,
    and that of a PrefixStore has the keys of its neighbours.
    """
    contents = etcd_contents(store)
    return None if contents is None else frozenset(contents)


def etcd_contents(store: Any) -> dict[str, bytes] | None:
    """Read all that is in an EtcdStore, in one request; None for other stores."""
    state = getattr(store, "_traced", None)
    inner = store if state is None else state.inner
    if type(inner).__name__ != "EtcdStore":
        return None
    nodes: Iterable[Any] = inner.client.get(key=inner.prefix).children
    return {
        b64decode(node.key.removeprefix(inner.prefix)).decode(
            "utf-8", "replace"
        ): b64decode(node.value)
        for node in nodes
        if not node.dir
    }


def all_keys(store: Any) -> Iterable[str]:
    """List all keys of a store, which takes one request and blocks on nothing."""
    listed = listing(store)
    keys: Iterable[str] = store.list_keys() if listed is None else listed
    return keys


@contextmanager
def side_connection(store: Any) -> Iterator[Any]:
    """Give a store to read_arrivals through while another thread waits on this one.

    A TCPStore is one connection under one lock, so whoever looks would wait for
    whoever waits; a clone has a connection of its own. The other stores have no such
    lock, and are given as they are.
    """
    if type(_bare(store)).__name__ != "TCPStore":
        yield store
        return
    clone = store.clone()
    try:
        yield clone
    finally:
        close_connection(clone)


def close_connection(store: Any) -> None:
    """Be done with a store of one's own: a traced one is kept alive until closed."""
    close = getattr(bottom_of(store), "close", None)
    if close is not None:
        close()


def _bare(store: Any) -> Any:
    """Peel PrefixStores and traced stores off, in whatever order they come."""
    bottom = bottom_of(store)
    state = getattr(bottom, "_traced", None)
    return bottom if state is None else _bare(state.inner)
