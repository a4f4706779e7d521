"""Finds the keys of a job in a store that cannot list its keys (torch before 2.10).

The ranks and agents of such a job add their keys to an index (`key_index`), under the
prefixes that torch uses. Other keys are not found.
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from tracedstore.coordination.arrivals import find_absent
from tracedstore.coordination.key_index import INDEX, read_index
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.coordination.rank_registry import parse_entry, prefix_of
from tracedstore.diagnosis.judgement.stalled import VERDICT
from tracedstore.diagnosis.observe.blocked_record import blocked_key
from tracedstore.naming.ranges import MAX_RANKS

# The prefixes under which the stores of a job have keys: none in the store that
# init_process_group creates, and those of the default process group.
_PREFIXES = ("", "default_pg/", "default_pg/0/", "default_pg/0//", "0//")
_RENDEZVOUS = "torch.rendezvous."
# The run id of torchrun without --rdzv-id.
_DEFAULT_RENDEZVOUS = f"{_RENDEZVOUS}none"
_AGENT_KEYS = ("MASTER_ADDR", "MASTER_PORT")
_AGENT_BARRIER = BarrierKeys("torchelastic/agent/terminal_state").num_members
# Maximum numbers of the newest barriers and rounds whose keys are looked for.
_MAX_BARRIERS = 128
_MAX_ROUNDS = 8
_MAX_STATE_BYTES = 8 * 1024 * 1024
# Maximum numbers of keys that are looked for: of ranks, and of ranks in barriers.
_MAX_RANK_KEYS = 128 * 1024
_MAX_BARRIER_RANK_KEYS = 64 * 1024


def find_known_keys(store: Any, heartbeat: Callable[[], None]) -> list[str]:
    """Return the existing keys among those that tracedstore and torchrun use.

    Args:
        store: The store.
        heartbeat: Is called after each answer of the store.
    """

    def existing(keys: Iterable[str]) -> list[str]:
        distinct = sorted(set(keys))
        absent = set(find_absent(all_exist, distinct))
        return [key for key in distinct if key not in absent]

    def all_exist(some: Sequence[str]) -> bool:
        found = bool(store.check(list(some)))
        heartbeat()
        return found

    def read(key: str) -> bytes:
        value: bytes = store.get(key)
        heartbeat()
        return value

    indexed = _read_indexes(_PREFIXES, existing, read)
    rendezvous = existing([*filter(_is_rendezvous, indexed), _DEFAULT_RENDEZVOUS])
    rounds = [f"{key}.{n}/" for key in rendezvous for n in _rounds(read(key))]
    indexed += _read_indexes(rounds, existing, read)
    indexed += [f"{prefix}{_AGENT_BARRIER}" for prefix in rounds]
    registered = existing(
        islice(filter(_is_registry, reversed(indexed)), _MAX_RANK_KEYS)
    )
    of_stalls = existing(key for entry in registered for key in _stall_keys(entry))
    prefixes = filter(None, map(BarrierKeys.prefix_of, reversed(indexed)))
    newest = list(map(BarrierKeys, islice(dict.fromkeys(prefixes), _MAX_BARRIERS)))
    of_barriers = set(existing(key for one in newest for key in one.of_all_ranks()))
    incomplete = [one for one in newest if one.last_member not in of_barriers]
    ranks = range(_world_size(map(read, registered[:1])))
    of_ranks = (
        key for one in incomplete for rank in ranks for key in one.of_rank(rank)
    )
    return [
        *rendezvous,
        *existing(f"{prefix}{key}" for prefix in rounds for key in _AGENT_KEYS),
        *registered,
        *of_stalls,
        *of_barriers,
        *existing(islice(of_ranks, _MAX_BARRIER_RANK_KEYS)),
    ]


def _read_indexes(
    prefixes: Sequence[str],
    existing: Callable[[Iterable[str]], list[str]],
    read: Callable[[str], bytes],
) -> list[str]:
    """Return the keys in the indexes under these prefixes, in order."""
    present = set(existing(f"{prefix}{INDEX}" for prefix in prefixes))
    return [
        f"{prefix}{key}"
        for prefix in prefixes
        if f"{prefix}{INDEX}" in present
        for key in read_index(read(f"{prefix}{INDEX}"))
    ]


def _is_registry(key: str) -> bool:
    return prefix_of(key) is not None


def _stall_keys(entry: str) -> Iterator[str]:
    """Return what the rank of a registry key writes while it is blocked."""
    prefix = prefix_of(entry)
    yield f"{prefix}{VERDICT}"
    yield f"{prefix}{blocked_key(int(entry.rpartition('/')[2]))}"


def _is_rendezvous(key: str) -> bool:
    return key.startswith(_RENDEZVOUS) and "/" not in key


def _rounds(value: bytes) -> range:
    """Return the newest rounds of a rendezvous, none if its state is unreadable."""
    # Imported only if needed: it imports torch's elastic modules, which takes a while.
    from tracedstore.rendezvous.state import parse_state  # noqa: PLC0415

    try:
        state = parse_state(b64decode(value[:_MAX_STATE_BYTES], validate=True))
    except ValueError:
        state = None
    if state is None:
        return range(0)
    return range(max(0, state.round - _MAX_ROUNDS + 1), state.round + 1)


def _world_size(entries: Iterable[bytes]) -> int:
    infos = filter(None, map(parse_entry, entries))
    return min(MAX_RANKS, max((info.world_size for info in infos), default=0))
