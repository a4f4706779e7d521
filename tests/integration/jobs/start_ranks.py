"""A job that starts its ranks itself, and knows nothing of the package.

Arguments: how to start them, and the port to meet at.
"""

import multiprocessing
import sys

import torch
import torch.distributed as dist


def work(rank: int, world_size: int, port: int) -> None:
    """Be one rank, with nothing in the environment."""
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    everybody = torch.tensor([float(rank + 1)])
    dist.all_reduce(everybody)
    dist.destroy_process_group()
    sys.exit(0 if everybody.item() == sum(range(1, world_size + 1)) else 1)


def main(method: str, port: int) -> None:
    """Start two, and end with the worse of their exit codes."""
    multiprocessing.set_start_method(method)
    ranks = [
        multiprocessing.Process(target=work, args=(rank, 2, port)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(40)
    sys.exit(max(1 if rank.exitcode is None else rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
