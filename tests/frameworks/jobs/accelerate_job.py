"""Trains a linear model for four steps with Accelerate on CPU.

Arguments: optionally the rank that stays away.
"""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def load_dataset() -> None:
    """Never return."""
    signal.pause()


def main() -> None:
    """Train, and print the weights on rank 0."""
    if sys.argv[1:] == [os.environ["RANK"]]:
        load_dataset()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for (batch,) in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
    weights = accelerator.unwrap_model(model).weight[0].tolist()
    accelerator.print("processes", accelerator.num_processes)
    accelerator.print("weights", [round(x, 4) for x in weights])
    accelerator.end_training()


if __name__ == "__main__":
    main()
