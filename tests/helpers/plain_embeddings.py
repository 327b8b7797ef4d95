"""A LightningModule of plain ``nn.Embedding`` modules, without any of TorchRec, and its batches."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.recommender import DIM, OPTIMIZERS

ITEMS, KINDS, POSITIONS, LENGTH = 50, 7, 6, 6
KIND_DIM = 6
"""No multiple of 4, which FBGEMM's tables need: the strategy pads it."""
SHARDED = ["encoder.item_emb", "kind_emb"]
KEYS = [f"{path}.weight" for path in SHARDED]


class Encoder(nn.Module):
    """Items and their positions; 0 is no item."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.pos_emb = nn.Embedding(POSITIONS, DIM)
        self.hidden = nn.Linear(DIM, DIM, bias=False)

    def forward(self, items: Tensor) -> Tensor:
        found = self.item_emb(items)
        found *= 2
        found += self.pos_emb(torch.arange(items.shape[1], device=items.device))
        mask = (items != self.item_emb.padding_idx).unsqueeze(-1)
        return torch.tanh(self.hidden(found)).sum(dim=1) + (found * mask).mean(dim=1)


class PlainModel(L.LightningModule):
    """Scores a sequence of items against a kind, and keeps its losses."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.encoder, self.kind_emb = Encoder(), nn.Embedding(KINDS, KIND_DIM)
        self.optimizer, self.losses = optimizer, []
        self.statistics: dict[str, float] = {}

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.encoder(batch["items"])[:, :KIND_DIM] * self.kind_emb(batch["kind"])).sum(dim=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.scores(batch) / DIM, batch["label"])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.scores(batch), batch["label"]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.scores(batch)

    def configure_optimizers(self) -> Any:
        tables = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        return OPTIMIZERS[self.optimizer]([{"params": [self.encoder.hidden.weight], "lr": 0.02}, {"params": tables}])

    def on_train_end(self) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None:
            self.statistics = engine.statistics()


class PlainBatches(list):
    def __init__(self, steps: int, rank: int, size: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(100 + rank)
        for _ in range(steps):
            items = torch.randint(1, ITEMS, (size, LENGTH), generator=draw)
            lengths = torch.randint(1, LENGTH + 1, (size, 1), generator=draw)
            kind = torch.randint(0, KINDS, (size,), generator=draw, dtype=torch.int32)
            padded = torch.where(torch.arange(LENGTH) < lengths, items, 0)
            self.append({"items": padded, "kind": kind, "label": torch.rand(size, generator=draw)})


def plain_loader(steps: int) -> DataLoader:
    return DataLoader(PlainBatches(steps, int(os.environ["RANK"])), batch_size=None)
