"""One process group in the environment that the test sets.

Arguments: an init method, or "wrapped" for a store that the program has wrapped, and
"instrument" for each call of instrument().
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY
from torch.distributed.distributed_c10d import _get_default_store

import tracedstore
from integration.harness import operation_counts, report
from tracedstore.common.identity import bottom_of
from tracedstore.coordination.rank_registry import read_ranks

for _ in sys.argv[2:]:
    tracedstore.instrument()
where: dict[str, Any] = {"init_method": sys.argv[1]}
if sys.argv[1] == "wrapped":
    where = {"store": tracedstore.wrap(dist.HashStore())}
dist.init_process_group("gloo", **where, rank=0, world_size=1)
value = torch.tensor([3.0])
dist.all_reduce(value)
bottom = bottom_of(_get_default_store())
report(
    store=type(bottom).__name__,
    value=value.item(),
    counted=operation_counts(REGISTRY),
    registered=[
        [info.rank, info.world_size, info.pid]
        for info in read_ranks(bottom, [0]).values()
    ],
)
sys.stdin.readline()
