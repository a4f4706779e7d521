"""Where the metrics of all ranks are, as Prometheus' service discovery wants it."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from tracedstore.coordination import ranks
from tracedstore.coordination.missing import beside


def targets() -> list[dict[str, Any]]:
    """List the ranks that registered in the stores this process registered in."""
    found: dict[int, ranks.RankInfo] = {}
    for store, world_size in ranks.stores():
        with beside(store) as free:
            found |= ranks.registered(free, range(world_size))
    return listed(found.values())


def listed(infos: Iterable[ranks.RankInfo]) -> list[dict[str, Any]]:
    """Write ranks down as ``http_sd`` and ``file_sd`` have them.

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


def _labels(info: ranks.RankInfo) -> dict[str, str]:
    known = {
        "run_id": info.run_id,
        "rank": info.rank,
        "local_rank": info.local_rank,
        "host": info.host,
    }
    return {name: str(value) for name, value in known.items() if value is not None}
