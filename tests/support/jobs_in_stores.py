"""Writes the keys of a job into a store, as its ranks write them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tracedstore.common.causes import Cause
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    encode_arrival,
    last_arrival,
)
from tracedstore.coordination.rank_registry import REGISTRY, RankInfo
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe.blocked_record import BLOCKED, BlockedRecord


def contents(store: Any) -> dict[str, bytes]:
    """Return the keys and values of a job."""
    return {key: store.get(key) for key in store.list_keys()}


def register(store: Any, rank: int, world_size: int, **fields: Any) -> RankInfo:
    """Register a rank; eight of them share a host."""
    defaults: dict[str, Any] = {
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "started": 1.0,
    }
    info = RankInfo(rank=rank, world_size=world_size, **defaults | fields)
    store.set(f"{REGISTRY}/{rank}", json.dumps(asdict(info)))
    return info


def arrive(
    store: Any, prefix: str, times: Mapping[int, float], *, complete: bool = False
) -> None:
    """Let ranks arrive at a barrier at some times."""
    keys = BarrierKeys(prefix)
    for rank, time in times.items():
        store.append(keys.ledger, encode_arrival(rank, time))
        store.add(keys.num_members, 1)
    if complete:
        *_, last = times
        store.set(keys.last_member, last_arrival(last))


def time_out(store: Any, prefix: str, *ranks: int) -> None:
    """Let ranks time out at a barrier."""
    for rank in ranks:
        store.append(BarrierKeys(prefix).confirmations, encode_arrival(rank, 1.0))


def block(store: Any, rank: int, started: float, **fields: Any) -> None:
    """Let a rank publish that it is blocked."""
    defaults: dict[str, Any] = {
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "operation": "get",
        "keys": ("default_pg/0//1//cpu//0/2",),
        "phase": "new_group 1",
        "awaits": (2,),
    }
    record = BlockedRecord(rank=rank, started=started, **defaults | fields)
    store.set(f"{BLOCKED}/{rank}", record.to_bytes())


def judge(
    store: Any, time: float, waiting: Iterable[int], causes: Mapping[int, Cause]
) -> None:
    """Publish the verdict that ranks wait for others."""
    awaited = [
        AwaitedRank(
            rank=rank,
            host=f"node{rank // 8}",
            pid=1000 + rank,
            cause=cause,
            doing=f"known to be {cause}",
        )
        for rank, cause in causes.items()
    ]
    verdict = Verdict(
        phase="new_group 1",
        cause=awaited[0].cause,
        awaited=tuple(awaited),
        awaited_ranks=tuple(causes),
        waiting_ranks=tuple(waiting),
        waited_seconds=30.0,
        evidence=("they answered",),
        remedy="look at them",
        time=time,
    )
    store.set(VERDICT, verdict.to_bytes())
