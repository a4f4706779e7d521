"""A worker of torchrun whose job hangs for good in its first attempt, and then not.

The argument is what the last rank does there: ``skips`` a collective that the others
call, ``leaves`` before they create a group, or is ``busy``, which passes.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import tracedstore

TENSOR = torch.ones(10)


def hang(scenario: str, *, is_odd: bool) -> None:
    """Do what the job hangs in."""
    if scenario == "skips":
        for _ in range(2):
            dist.all_reduce(TENSOR)
            dist.barrier()
        if not is_odd:
            dist.all_reduce(TENSOR)
        dist.barrier()
    elif scenario == "leaves":
        if is_odd:
            os._exit(0)
        dist.new_group()
    else:
        if is_odd:
            time.sleep(4 * float(os.environ["TRACEDSTORE_STALL_AFTER"]))
        dist.barrier()


def main() -> None:
    """Run one attempt."""
    tracedstore.instrument()
    # torch connects to a rank when it is first used: one that has left is noticed.
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    sys.stdout.write(f"rank {rank} begins attempt {attempt}\n")
    if attempt == "0":
        hang(sys.argv[1], is_odd=rank == world_size - 1)
    dist.barrier()
    sys.stdout.write(f"rank {rank} completes attempt {attempt}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
