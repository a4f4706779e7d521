"""The metrics endpoints of a job, for Prometheus' service discovery.

A target is a rank, or the agent of a node that serves its workers.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tracedstore import names
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.identity import number
from tracedstore.common.threads import run_with_timeout
from tracedstore.coordination import rank_registry
from tracedstore.coordination.store_access import close_connection, side_connection
from tracedstore.diagnosis.ask.responder import connect_to_workers
from tracedstore.local.host_ranks import AGENT_WORKERS
from tracedstore.recording.counters import store_of
from tracedstore.recording.recorder import RECORDER

# Seconds to read one store.
_READ_TIMEOUT = 3.0
# The ids of what is being read. The thread that reads it keeps it alive.
_being_read: set[int] = set()


def reset() -> None:
    """Forget which stores are read, as a forked child must: it has no such thread."""
    _being_read.clear()


def targets(*, per_node: bool = False) -> list[dict[str, Any]]:
    """Return the ranks that registered in the stores this process registered in.

    A store that does not respond, because its job has ended, has none. Entries that
    are not valid are left out, and count as one failure of the endpoint.

    Args:
        per_node: An agent reads the store of its workers.
    """
    found: list[rank_registry.RankInfo] = []
    invalid = 0
    reads: dict[Any, Callable[[], rank_registry.Registry]] = {
        handle: partial(_registered, handle, world_size)
        for handle, world_size in rank_registry.registered_stores()
    }
    if per_node and AGENT_WORKERS.workers:
        reads[AGENT_WORKERS] = partial(_registered_workers, AGENT_WORKERS.environ)
    for store, read in reads.items():
        # A store that hung the last time may still hang; one thread in it is enough.
        if id(store) in _being_read:
            continue
        with suppress(Exception):
            registry = run_with_timeout(_READ_TIMEOUT, partial(_read, store, read))
            found += registry.ranks()
            invalid += registry.invalid_count
    if invalid:
        error = TracedStoreError(
            f"{invalid_entries(invalid)}, and left out of /sd: another program has"
            f" written to the keys below {rank_registry.REGISTRY}"
        )
        RECORDER.failures.add(names.ENDPOINT, error)
    return listed(found)


def invalid_entries(count: int) -> str:
    """Return a text with the number of entries that are not valid."""
    noun, verb = ("entry", "is") if count == 1 else ("entries", "are")
    return f"{count} registry {noun} {verb} not valid"


def _read(
    store: Any, read: Callable[[], rank_registry.Registry]
) -> rank_registry.Registry:
    _being_read.add(id(store))
    try:
        return read()
    finally:
        _being_read.discard(id(store))


def _registered(handle: Any, world_size: int) -> rank_registry.Registry:
    with side_connection(store_of(handle)) as free:
        return rank_registry.read_entries(free, range(world_size))


def _registered_workers(environ: Mapping[str, str]) -> rank_registry.Registry:
    """Read the entries in the workers' store."""
    store = connect_to_workers(environ)
    try:
        size = number(environ.get("WORLD_SIZE")) or 0
        entries = rank_registry.read_entries(store, range(size))
        if entries.ranks():
            return entries
        # A program that gives its own PrefixStore to a barrier registers below it. Its
        # entries that are not valid are among those of all prefixes.
        return rank_registry.read_registry(store)
    finally:
        close_connection(store)


def listed(infos: Iterable[rank_registry.RankInfo]) -> list[dict[str, Any]]:
    """Return endpoints in the format of ``http_sd`` and ``file_sd``.

    Ranks without an endpoint are left out. A process is one target. If it is a rank in
    several stores, its rank in the largest world is the label. The ranks that an agent
    serves are one target, whose samples have the ranks. Ranks of different stores may
    have the same number.
    """
    # By the address. One that is a loopback address is another process on each host.
    found: dict[tuple[str, str], rank_registry.RankInfo] = {}
    for info in sorted(infos, key=lambda info: (-info.world_size, info.rank)):
        if info.metrics:
            found.setdefault((info.metrics, info.host), info)
    ordered = sorted(found.items(), key=lambda item: (item[1].rank, item[0]))
    return [
        {
            "targets": [urlsplit(url).netloc],
            "labels": {"__scheme__": urlsplit(url).scheme, **_labels(info)},
        }
        for (url, _), info in ordered
    ]


def _labels(info: rank_registry.RankInfo) -> dict[str, str]:
    known: dict[str, Any] = {"run_id": info.run_id}
    if info.agent is None:
        known |= {"rank": info.rank, "local_rank": info.local_rank}
    known["host"] = info.host
    return {name: str(value) for name, value in known.items() if value is not None}
