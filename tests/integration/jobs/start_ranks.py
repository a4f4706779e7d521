"""A job that starts its ranks itself and does not import the package.

Arguments: the start method, and the port of the store.
"""

import multiprocessing
import sys

import torch
import torch.distributed as dist


def work(rank: int, world_size: int, port: int) -> None:
    """Run one rank without environment variables."""
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    sys.exit(0 if total.item() == sum(range(1, world_size + 1)) else 1)


def main(method: str, port: int) -> None:
    """Start two ranks, and exit with the higher of their exit codes."""
    multiprocessing.set_start_method(method)
    ranks = [
        multiprocessing.Process(target=work, args=(rank, 2, port)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    sys.exit(max(1 if rank.exitcode is None else rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
