"""A worker of torchrun: all but rank 1 come to a barrier, through the agent's store.

An argument is the barrier's timeout, else a second.
"""

import os
import signal
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import tracedstore


@record
def main() -> None:
    """Come, or stay away until told to end."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 1:
        # Not for good, should torchrun be gone.
        signal.alarm(60)
        signal.pause()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        None,
        is_master=False,
    )
    timeout = float(sys.argv[1]) if sys.argv[1:] else 1.0
    tracedstore.barrier(store, world_size, "checkpoint/7", timeout, rank=rank)


if __name__ == "__main__":
    main()
