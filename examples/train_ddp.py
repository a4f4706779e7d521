"""Train a small model with DistributedDataParallel on CPUs under torchrun.

    torchrun --nnodes 1 --nproc-per-node 2 \
        --rdzv-backend traced-c10d --rdzv-endpoint localhost:29400 \
        examples/train_ddp.py --steps 20

The program does not import tracedstore. The rendezvous backend does the tracing.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(steps: int, pause: float, stop_file: Path | None) -> None:
    """Train for a number of steps, or until the stop file exists."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        batch = torch.randn(16, 8)
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            message = f"training, pid {os.getpid()}, restart {restarts}"
            print(f"rank {rank} of {world_size}: {message}", flush=True)
        # All ranks must stop at the same step: a rank that stops alone blocks the
        # others in their next collective.
        stop = torch.tensor(int(stop_file is not None and stop_file.exists()))
        dist.all_reduce(stop)
        if stop or step == steps:
            message = f"done after {step} steps, loss {loss:.3f}"
            print(f"rank {rank} of {world_size}: {message}", flush=True)
            return
        time.sleep(pause)


def main() -> None:
    """Create the process group and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to sleep after each step"
    )
    parser.add_argument("--stop-file", type=Path, help="stop when this file exists")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    train(options.steps, options.pause, options.stop_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
