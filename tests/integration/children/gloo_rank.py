"""One rank of a gloo group over a traced store without a Python reference.

Arguments: "tcp" or "file"; the server's port (0 to serve) or the file's path; rank;
world size.
"""

import gc
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import operation_counts, report
from support.versions import has_split_group
from tracedstore import store as store_module

MINUTE = timedelta(seconds=60)


def join(kind: str, address: str, rank: int, world_size: int) -> None:
    """Join the group, and keep no reference to its store."""
    bare: dist.Store
    if kind == "file":
        bare = dist.FileStore(address, world_size)
    else:
        port = int(address)
        bare = dist.TCPStore(
            "127.0.0.1", port, None, is_master=port == 0, wait_for_workers=False
        )
        report(port=bare.port)
    dist.init_process_group(
        # Only one device: with two, torch's split_group below would make both
        # backends use the same keys.
        "cpu:gloo",
        store=tracedstore.wrap(bare),
        rank=rank,
        world_size=world_size,
        timeout=MINUTE,
    )


def main() -> None:
    """Run collectives on several groups, and report the results."""
    kind, address, rank, world_size = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    join(kind, address, rank, world_size)
    gc.collect()

    def summed(group: dist.ProcessGroup | None = None) -> float:
        number = torch.tensor([rank + 1.0])
        dist.all_reduce(number, group=group)
        return number.item()

    total = summed()
    total_again = summed(dist.new_group(list(range(world_size))))
    gc.collect()
    ends = [0, world_size - 1]
    group_of_ends = dist.new_group(ends)
    of_ends = summed(group_of_ends) if rank in ends else None
    dist.barrier()
    # dist.split_group needs an accelerator, but the method that it calls does not.
    # That method clones the store in C++.
    world: Any = dist.group.WORLD
    number = torch.tensor([rank + 1.0])
    if has_split_group():
        split = world.split_group(list(range(world_size)), MINUTE, None, "split")
        gc.collect()
        split.allreduce(number).wait()
    report(
        everybody=total,
        again=total_again,
        of_ends=of_ends,
        split=number.item(),
        counted=operation_counts(REGISTRY),
        kept_alive=len(store_module._kept_alive),
    )


main()
