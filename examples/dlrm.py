"""TorchRec's DLRM as a LightningModule, with several tables of bags, on synthetic clicks.

``python examples/dlrm.py`` trains on two ranks, and loads the checkpoint into the plain module. Source: Naumov et al., Deep
Learning Recommendation Model (arXiv 1906.00091).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from lightning_freescale import BubbleProfiler, FreeScaleDataModule

ROWS = {"user": 20_000, "item": 5_000, "shop": 300, "viewed": 5_000}
DENSE, DIM = 8, 16


class Clicks(Dataset[dict[str, Any]]):
    """Samples with labels from hidden preferences. ``"viewed"`` has few ids in most samples, and hundreds in some."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.viewed = np.clip(draw.lognormal(2, 1.2, samples), 1, 400).astype(int)
        self._ends = np.cumsum(self.viewed)
        counts = {feature: self._ends[-1] if feature == "viewed" else samples for feature in ROWS}
        self._ids = {feature: np.minimum(draw.zipf(1.3, counts[feature]), rows) - 1 for feature, rows in ROWS.items()}
        self._dense = draw.normal(size=(samples, DENSE)).astype(np.float32)
        taste = np.random.default_rng(1).normal(size=(2, max(ROWS.values())))  # the same for every seed
        liked = taste[0][self._ids["item"]] + taste[1][self._ids["shop"]] + self._dense[:, 0]
        self._clicked = (liked + draw.logistic(size=samples) > 0).astype(np.float32)

    def __len__(self) -> int:
        return len(self.viewed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ids of every feature, dense numbers of shape ``[DENSE]``, and the label."""
        end = self._ends[index]
        ids = {name: ids[index : index + 1] for name, ids in self._ids.items()}
        ids["viewed"] = self._ids["viewed"][end - self.viewed[index] : end]
        return {"ids": ids, "dense": self._dense[index], "clicked": self._clicked[index]}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ``ids``, a KeyedJaggedTensor; ``dense``, shape ``[samples, DENSE]``; ``clicked``, shape ``[samples]``."""
    parts = [sample["ids"][feature] for feature in ROWS for sample in samples]
    values, lengths = torch.from_numpy(np.concatenate(parts)), torch.tensor([len(part) for part in parts])
    return {
        "ids": KeyedJaggedTensor(keys=list(ROWS), values=values, lengths=lengths),
        "dense": torch.from_numpy(np.stack([sample["dense"] for sample in samples])),
        "clicked": torch.tensor([sample["clicked"] for sample in samples]),
    }


class ClickModel(L.LightningModule):
    """Predicts whether a sample is clicked."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=feature, num_embeddings=rows, embedding_dim=DIM, feature_names=[feature])
            for feature, rows in ROWS.items()
        ]
        self.model = DLRM(EmbeddingBagCollection(tables=tables), DENSE, [32, DIM], [32, 1])
        self.auroc = BinaryAUROC()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's samples."""
        loss = nn.functional.binary_cross_entropy_with_logits(self._rate(batch), batch["clicked"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Update the area under the ROC curve of all ranks."""
        self.auroc.update(self._rate(batch), batch["clicked"].int())
        self.log("auroc", self.auroc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the tables."""
        return torch.optim.Adagrad(self.parameters(), lr=0.02)

    def _rate(self, batch: dict[str, Any]) -> Tensor:
        return self.model(batch["dense"], batch["ids"]).squeeze(1)


def main() -> None:
    """Train, save a checkpoint, and load it into the plain module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("dlrm.ckpt"), help="path of the checkpoint (default: dlrm.ckpt)")
    options = parser.parse_args()
    L.seed_everything(0)
    train, validate = Clicks(options.samples), Clicks(options.samples // 10, seed=2)
    data = FreeScaleDataModule(train, train.viewed, 64, collate_fn=collate, val_dataset=validate)
    trainer = L.Trainer(
        strategy="freescale", accelerator="auto", devices=2, max_epochs=options.epochs, callbacks=[BubbleProfiler()],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(ClickModel(), data)
    trainer.save_checkpoint(options.out)
    if trainer.is_global_zero:
        plain = ClickModel()
        plain.load_state_dict(torch.load(options.out, weights_only=False)["state_dict"])
        with torch.no_grad():
            print("ratings of the plain module:", plain.eval()._rate(collate([validate[0], validate[1]])).sigmoid().tolist())


if __name__ == "__main__":
    main()
