"""Trains a linear model for four steps with Ray Train on CPU.

Arguments: a number of workers, and optionally the rank that stays away when the others
create a group. Ray's own output has process ids, so the result goes to the file
`weights`.
"""

import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist


def load_dataset() -> None:
    """Never return."""
    signal.pause()


def train(config: dict[str, Any]) -> None:
    """Train in one worker, and print the weights on rank 0."""
    torch.manual_seed(1)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
    if dist.get_rank() == config["absent"]:
        load_dataset()
    dist.new_group(timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        weights = [round(x, 4) for x in model.module.weight[0].tolist()]
        Path(config["file"]).write_text(f"weights {weights}\n", "utf-8")


def main() -> None:
    """Run the workers in a Ray that ends with this process."""
    ray.init(include_dashboard=False, log_to_driver=True, num_cpus=4)
    absent = int(sys.argv[2]) if sys.argv[2:] else None
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"absent": absent, "file": str(Path.cwd() / "weights")},
        scaling_config=ray.train.ScalingConfig(num_workers=int(sys.argv[1])),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
