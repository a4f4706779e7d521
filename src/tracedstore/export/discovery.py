"""The metrics endpoints of a job, for Prometheus' service discovery.

A target is a rank, or the agent of a node that serves its workers.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from tracedstore import names
from tracedstore.coordination import rank_registry
from tracedstore.coordination.connections import close_connection, side_connection
from tracedstore.core.counters import store_of
from tracedstore.core.errors import TracedStoreError
from tracedstore.core.identity import number
from tracedstore.core.recorder import RECORDER
from tracedstore.core.timeouts import run_with_timeout
from tracedstore.diagnosis.agent_workers import AGENT_WORKERS, connect

# Seconds to read one store.
_READ_TIMEOUT = 3.0
_being_read: WeakSet[Any] = WeakSet()


def targets(*, per_node: bool = False) -> list[dict[str, Any]]:
    """Return the ranks that registered in the stores this process registered in.

    A store that does not respond, because its job has ended, has none. Entries that
    are not valid are left out, and count as one failure of the endpoint.

    Args:
        per_node: An agent reads the store of its workers.
    """
    found: dict[int, rank_registry.RankInfo] = {}
    invalid = 0
    reads: dict[Any, Callable[[], rank_registry.Entries]] = {
        handle: partial(_registered, handle, world_size)
        for handle, world_size in rank_registry.registered_stores()
    }
    if per_node and AGENT_WORKERS.workers:
        reads[AGENT_WORKERS] = partial(_registered_workers, AGENT_WORKERS.environ)
    for store, read in reads.items():
        # A store that hung the last time may still hang; one thread in it is enough.
        if store in _being_read:
            continue
        with suppress(Exception):
            entries = run_with_timeout(_READ_TIMEOUT, partial(_read, store, read))
            found |= entries.infos
            invalid += entries.invalid_count
    if invalid:
        error = TracedStoreError(
            f"{invalid_entries(invalid)}, and left out of /sd: another program has"
            f" written to the keys below {rank_registry.REGISTRY}"
        )
        RECORDER.failures.add(names.ENDPOINT, error)
    return listed(found.values())


def invalid_entries(count: int) -> str:
    """Return a text with the number of entries that are not valid."""
    noun, verb = ("entry", "is") if count == 1 else ("entries", "are")
    return f"{count} registry {noun} {verb} not valid"


def _read(
    store: Any, read: Callable[[], rank_registry.Entries]
) -> rank_registry.Entries:
    _being_read.add(store)
    try:
        return read()
    finally:
        _being_read.discard(store)


def _registered(handle: Any, world_size: int) -> rank_registry.Entries:
    with side_connection(store_of(handle)) as free:
        return rank_registry.read_entries(free, range(world_size))


def _registered_workers(environ: Mapping[str, str]) -> rank_registry.Entries:
    """Read the entries in the workers' store."""
    store = connect(environ)
    try:
        size = number(environ.get("WORLD_SIZE")) or 0
        entries = rank_registry.read_entries(store, range(size))
        if entries.infos or not hasattr(store, "list_keys"):
            return entries
        # A program that gives its own PrefixStore to a barrier registers below it.
        registry = rank_registry.read_registry(store)
        infos = {info.rank: info for info in registry.ranks()}
        return rank_registry.Entries(
            infos=infos, invalid_count=entries.invalid_count + registry.invalid_count
        )
    finally:
        close_connection(store)


def listed(infos: Iterable[rank_registry.RankInfo]) -> list[dict[str, Any]]:
    """Return endpoints in the format of ``http_sd`` and ``file_sd``.

    Ranks without an endpoint are left out. Those that an agent serves are one target,
    whose samples have the ranks.
    """
    found: dict[tuple[str, int | None], rank_registry.RankInfo] = {}
    for info in sorted(infos, key=lambda info: info.rank):
        if info.metrics:
            rank = info.rank if info.agent is None else None
            found.setdefault((info.metrics, rank), info)
    return [
        {
            "targets": [urlsplit(url).netloc],
            "labels": {"__scheme__": urlsplit(url).scheme, **_labels(info)},
        }
        for (url, _), info in found.items()
    ]


def _labels(info: rank_registry.RankInfo) -> dict[str, str]:
    known: dict[str, Any] = {"run_id": info.run_id}
    if info.agent is None:
        known |= {"rank": info.rank, "local_rank": info.local_rank}
    known["host"] = info.host
    return {name: str(value) for name, value in known.items() if value is not None}
