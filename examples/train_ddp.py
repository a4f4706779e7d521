"""Train something small with DistributedDataParallel, on CPUs, under torchrun.

    torchrun --nnodes 1 --nproc-per-node 2 \
        --rdzv-backend traced-c10d --rdzv-endpoint localhost:29400 \
        examples/train_ddp.py --steps 20

There is nothing of tracedstore in it: the rendezvous is traced by its backend.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(steps: int, pause: float, stop_file: Path | None) -> None:
    """Train until the steps are done, or until somebody wants it to stop."""
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
            say = f"training, pid {os.getpid()}, restart {restarts}"
            print(f"rank {rank} of {world_size}: {say}", flush=True)
        # All of them stop at the same step, or the others would wait for one.
        stop = torch.tensor(int(stop_file is not None and stop_file.exists()))
        dist.all_reduce(stop)
        if stop or step == steps:
            say = f"done after {step} steps, loss {loss:.3f}"
            print(f"rank {rank} of {world_size}: {say}", flush=True)
            return
        time.sleep(pause)


def main() -> None:
    """Join the others, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
    parser.add_argument("--stop-file", type=Path, help="stop when this file is there")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    train(options.steps, options.pause, options.stop_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
