"""Saves a checkpoint with torch's helper processes; that of rank 1 is late."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

# multiprocessing imports the main module of a process that it spawns.
if __name__ == "__mp_main__" and os.environ["RANK"] == "1":
    time.sleep(600)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    checkpoint.async_save(
        {"weights": torch.ones(4)},
        checkpoint_id=sys.argv[1],
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    time.sleep(600)
