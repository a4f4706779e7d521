"""Where the metrics of all ranks are, as Prometheus' service discovery wants it."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from tracedstore.coordination import ranks
from tracedstore.coordination.missing import beside


def targets(run_id: str | None) -> list[dict[str, Any]]:
    """List the ranks that registered in the stores this process registered in."""
    found: dict[int, ranks.RankInfo] = {}
    for store, world_size in ranks.stores():
        with beside(store) as free:
            found |= ranks.registered(free, range(world_size))
    return listed(found.values(), run_id)


def listed(infos: Iterable[ranks.RankInfo], run_id: str | None) -> list[dict[str, Any]]:
    """Write ranks down as ``http_sd`` and ``file_sd`` have them.

    Ranks without an endpoint are left out.
    """
    return [
        {
            "targets": [urlsplit(info.metrics).netloc],
            "labels": {
                "__scheme__": urlsplit(info.metrics).scheme,
                **({} if run_id is None else {"run_id": run_id}),
                "rank": str(info.rank),
                **(
                    {}
                    if info.local_rank is None
                    else {"local_rank": str(info.local_rank)}
                ),
                "host": info.host,
            },
        }
        for info in sorted(infos, key=lambda info: info.rank)
        if info.metrics
    ]
