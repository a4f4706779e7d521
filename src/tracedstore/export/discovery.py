"""The metrics endpoints of all ranks, for Prometheus' service discovery."""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import side_connection
from tracedstore.core.timeouts import run_with_timeout

# Seconds to read one store.
_READ_TIMEOUT = 3.0
_being_read: WeakSet[Any] = WeakSet()


def targets() -> list[dict[str, Any]]:
    """Return the ranks that registered in the stores this process registered in.

    A store that does not respond, because its job has ended, has none.
    """
    found: dict[int, rank_registry.RankInfo] = {}
    for store, world_size in rank_registry.registered_stores():
        # A store that hung the last time may still hang; one thread in it is enough.
        if store in _being_read:
            continue
        with suppress(Exception):
            found |= run_with_timeout(
                _READ_TIMEOUT, partial(_registered, store, world_size)
            )
    return listed(found.values())


def _registered(store: Any, world_size: int) -> dict[int, rank_registry.RankInfo]:
    _being_read.add(store)
    try:
        with side_connection(store) as free:
            return rank_registry.read_ranks(free, range(world_size))
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
