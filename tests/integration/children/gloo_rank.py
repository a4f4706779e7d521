"""One rank of a gloo group that meets through a traced store nobody refers to.

Arguments: tcp or file, where (the server's port, or 0 to be the server; the file),
rank, world size.
"""

import gc
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import all_counted, report
from tracedstore import store as store_module

MINUTE = timedelta(seconds=60)


def join(kind: str, where: str, rank: int, world_size: int) -> None:
    """Join the group, and keep no reference to its store."""
    bare: dist.Store
    if kind == "file":
        bare = dist.FileStore(where, world_size)
    else:
        port = int(where)
        bare = dist.TCPStore(
            "127.0.0.1", port, None, is_master=port == 0, wait_for_workers=False
        )
        report(port=bare.port)
    dist.init_process_group(
        # Only one device: for two of them torch's split_group below would make
        # both backends meet under the same keys.
        "cpu:gloo",
        store=tracedstore.wrap(bare),
        rank=rank,
        world_size=world_size,
        timeout=MINUTE,
    )


def main() -> None:
    """Do what ranks do, and report the results."""
    kind, where, rank, world_size = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    join(kind, where, rank, world_size)
    gc.collect()

    def summed(group: dist.ProcessGroup | None = None) -> float:
        number = torch.tensor([rank + 1.0])
        dist.all_reduce(number, group=group)
        return number.item()

    everybody = summed()
    again = summed(dist.new_group(list(range(world_size))))
    gc.collect()
    ends = [0, world_size - 1]
    group_of_ends = dist.new_group(ends)
    of_ends = summed(group_of_ends) if rank in ends else None
    dist.barrier()
    # dist.split_group wants an accelerator; what it calls does not. It clones the
    # store, in C++.
    world: Any = dist.group.WORLD
    split = world.split_group(list(range(world_size)), MINUTE, None, "split")
    gc.collect()
    number = torch.tensor([rank + 1.0])
    split.allreduce(number).wait()
    report(
        everybody=everybody,
        again=again,
        of_ends=of_ends,
        split=number.item(),
        counted=all_counted(REGISTRY),
        kept_alive=len(store_module._kept_alive),
    )


main()
