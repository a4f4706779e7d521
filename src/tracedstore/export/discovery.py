"""The metrics endpoints of all ranks, for Prometheus' service discovery."""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from tracedstore import names
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import side_connection
from tracedstore.core.errors import TracedStoreError
from tracedstore.core.recorder import RECORDER
from tracedstore.core.timeouts import run_with_timeout

# Seconds to read one store.
_READ_TIMEOUT = 3.0
_being_read: WeakSet[Any] = WeakSet()


def targets() -> list[dict[str, Any]]:
    """Return the ranks that registered in the stores this process registered in.

    A store that does not respond, because its job has ended, has none. Entries that
    are not valid are left out, and count as one failure of the endpoint.
    """
    found: dict[int, rank_registry.RankInfo] = {}
    invalid = 0
    for store, world_size in rank_registry.registered_stores():
        # A store that hung the last time may still hang; one thread in it is enough.
        if store in _being_read:
            continue
        with suppress(Exception):
            entries = run_with_timeout(
                _READ_TIMEOUT, partial(_registered, store, world_size)
            )
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


def _registered(store: Any, world_size: int) -> rank_registry.Entries:
    _being_read.add(store)
    try:
        with side_connection(store) as free:
            return rank_registry.read_entries(free, range(world_size))
    finally:
        _being_read.discard(store)


def listed(infos: Iterable[rank_registry.RankInfo]) -> list[dict[str, Any]]:
    """Return ranks in the format of ``http_sd`` and ``file_sd``.

    Ranks without an endpoint are left out.
    """
    return [
        {
            "targets": [urlsplit(info.metrics).netloc],
            "labels": {
                "__scheme__": urlsplit(info.metrics).scheme,
                **_labels(info),
            },
        }
        for info in sorted(infos, key=lambda info: info.rank)
        if info.metrics
    ]


def _labels(info: rank_registry.RankInfo) -> dict[str, str]:
    known = {
        "run_id": info.run_id,
        "rank": info.rank,
        "local_rank": info.local_rank,
        "host": info.host,
    }
    return {name: str(value) for name, value in known.items() if value is not None}
