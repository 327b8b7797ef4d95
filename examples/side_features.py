"""Side features: one collection for sequences of items and categories, and another for bags of user attributes.

``python examples/side_features.py`` trains on two ranks. The strategy shards and overlaps each collection separately, because
the batch, an ordinary dict, contains the ids of both. As usual, TorchRec's configuration assigns features to tables.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule

ITEMS, CATEGORIES, CITIES, DIM = 3_000, 50, 200, 32


class Visits(Dataset[dict[str, Tensor]]):
    """Synthetic visits and purchases. Items of seen categories and of interests are bought more often."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.empty(samples).log_normal_(2.5, 1, generator=draw).clamp(1, 200).long()
        self.seeds = torch.randint(2**31, (samples,), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``item`` and ``category``, shape ``[length]``; ``interest``, shape ``[1 to 4]``; others, shape ``[1]``."""
        draw = torch.Generator().manual_seed(int(self.seeds[index]))
        interest = torch.randint(CATEGORIES, (int(torch.randint(1, 5, (1,), generator=draw)),), generator=draw)
        taste = interest[torch.randint(len(interest), (int(self.lengths[index]),), generator=draw)]
        item = taste + CATEGORIES * torch.randint(ITEMS // CATEGORIES, taste.shape, generator=draw)
        bought = torch.randint(2, (1,), generator=draw)
        liked = interest[:1] if bought else torch.randint(CATEGORIES, (1,), generator=draw)
        shown = liked + CATEGORIES * torch.randint(ITEMS // CATEGORIES, (1,), generator=draw)
        city = torch.randint(CITIES, (1,), generator=draw)
        return {
            "item": item, "category": item % CATEGORIES, "shown": shown, "shown_category": shown % CATEGORIES,
            "city": city, "interest": interest, "bought": bought,
        }  # fmt: skip


def jagged(samples: list[dict[str, Tensor]], *features: str) -> KeyedJaggedTensor:
    """Return the ids of some features."""
    parts = [sample[feature] for feature in features for sample in samples]
    return KeyedJaggedTensor(keys=list(features), values=torch.cat(parts), lengths=torch.tensor([len(p) for p in parts]))


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return ``sequence`` and ``user``, the ids of each collection, and ``bought``, float of shape ``[samples]``."""
    return {
        "sequence": jagged(samples, "item", "shown", "category", "shown_category"),
        "user": jagged(samples, "city", "interest"),
        "bought": torch.cat([sample["bought"] for sample in samples]).float(),
    }


class SideFeatures(L.LightningModule):
    """Attends from the shown item and its category over the history, and then adds the user's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item", "shown"]),
                EmbeddingConfig(
                    name="category", num_embeddings=CATEGORIES, embedding_dim=DIM, feature_names=["category", "shown_category"]
                ),
            ]
        )
        self.attributes = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="city", num_embeddings=CITIES, embedding_dim=DIM, feature_names=["city"]),
                EmbeddingBagConfig(name="interest", num_embeddings=CATEGORIES, embedding_dim=DIM, feature_names=["interest"]),
            ]
        )
        self.attend = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.rate = nn.Sequential(nn.Linear(4 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))
        self.auroc = BinaryAUROC()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the logits of a purchase, shape ``[samples]``."""
        rows, user = self.sequences(batch["sequence"]), self.attributes(batch["user"]).values()
        lengths = batch["sequence"]["item"].lengths().tolist()
        history = pad_sequence((rows["item"].values() + rows["category"].values()).split(lengths), batch_first=True)
        shown = rows["shown"].values() + rows["shown_category"].values()
        ends = torch.tensor(lengths, device=shown.device)[:, None]
        padding = torch.arange(history.shape[1], device=shown.device) >= ends
        seen = self.attend(shown[:, None], history, history, key_padding_mask=padding, need_weights=False)[0][:, 0]
        return self.rate(torch.cat([shown, seen, user], dim=1)).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's samples."""
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["bought"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Update the area under the ROC curve of all ranks."""
        self.auroc.update(self(batch), batch["bought"].int())
        self.log("auroc", self.auroc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the tables."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, and validate every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8_000)
    options = parser.parse_args()
    L.seed_everything(0)
    train = Visits(options.samples)
    data = FreeScaleDataModule(train, train.lengths, 64, collate_fn=collate, val_dataset=Visits(1_000, seed=1))
    trainer = L.Trainer(
        strategy="freescale", accelerator="auto", devices=2, max_epochs=options.epochs, callbacks=[BubbleProfiler()],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(SideFeatures(), data)
    trainer.print("AUROC:", round(trainer.callback_metrics["auroc"].item(), 3))


if __name__ == "__main__":
    main()
