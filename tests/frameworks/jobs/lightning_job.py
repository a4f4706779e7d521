"""Trains a linear model for four steps with Lightning's DDP strategy on CPU.

Arguments: a number of workers, and optionally the rank that stays away.
"""

import os
import signal
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):  # type: ignore[misc]
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def load_dataset() -> None:
    """Never return."""
    signal.pause()


def main() -> None:
    """Train, and print the weights on rank 0."""
    if sys.argv[2:] == [os.environ.get("LOCAL_RANK", "0")]:
        load_dataset()
    lightning.seed_everything(1)
    data = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[1]),
        strategy="ddp",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    if trainer.global_rank == 0:
        print("weights", [round(x, 4) for x in model.layer.weight[0].tolist()])


if __name__ == "__main__":
    main()
