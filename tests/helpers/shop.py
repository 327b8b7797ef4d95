"""What a user of the command line has in a folder: a module in shop.py, and interactions in visits.csv."""

from __future__ import annotations

from pathlib import Path

MODULE = """
from typing import Any

import lightning as L
import torch

class NextItem(L.LightningModule):
    def __init__(self, dim: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items, self.head = torch.nn.Embedding(40, dim), torch.nn.Linear(dim, 40)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.items(batch["features"].values())), batch["target"])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch["target"])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""


def write_shop(folder: Path, users: int) -> None:
    (folder / "shop.py").write_text(MODULE)
    rows = [(user, (user * 7 + time) % 40, time) for user in range(users) for time in range(5 + user % 9)]
    (folder / "visits.csv").write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in rows))
