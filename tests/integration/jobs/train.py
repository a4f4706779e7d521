"""A training script that does not import the package.

Argument: a folder, to which each rank writes its trained parameters and its Prometheus
exposition.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from prometheus_client import generate_latest
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path) -> None:
    """Train for three steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), float(rank + step))).pow(2).sum()
        loss.backward()
        optimizer.step()
    parameters = [parameter.tolist() for parameter in model.parameters()]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    dist.barrier()
    (folder / f"{rank}.prom").write_bytes(generate_latest())
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps([parameters, total.item()]))


main(Path(sys.argv[1]))
