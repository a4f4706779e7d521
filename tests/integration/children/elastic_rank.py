"""A worker of torchrun: all ranks but rank 1 call a barrier over the agent's store.

Argument: the barrier's timeout in seconds, 1 by default.
"""

import os
import signal
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import tracedstore


@record
def main() -> None:
    """Call the barrier, or wait for a signal as rank 1."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 1:
        # Ends after ten minutes even if torchrun was killed.
        signal.alarm(600)
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
