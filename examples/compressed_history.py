"""Long histories that are compressed into a few learned tokens, and the cost function of such a model.

``python examples/compressed_history.py`` trains on two ranks. Learned queries attend over the older part of a history once.
Recent items attend to each other and to the results of the queries, as in personalized sequence compression (PerSRec). The cost
of the old part is proportional to its length, and only that of the recent part to the square of its length. The default cost,
attention over the whole history, is wrong for this model, so the data module gets the model's own cost.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchmetrics import MeanMetric
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.balance import CostModel, assign

ITEMS, DIM = 2_000, 64
RECENT, TOKENS = 64, 8  # uncompressed items; tokens that replace all earlier items


def cost(lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the multiply-adds of :class:`CompressedHistory` for each length, without padding."""
    recent = np.minimum(lengths, RECENT)
    old = lengths - recent
    attended = recent + TOKENS
    read = old * (2 * DIM**2 + 2 * TOKENS * DIM)  # keys, values and scores of each old item, once
    return read + attended * 12 * DIM**2 + 2 * DIM * attended**2


def imbalance(lengths: NDArray[Any], believed: NDArray[Any], ranks: int = 8, batch_size: int = 32) -> float:
    """Return the maximum over the mean of the ranks' true costs of a global batch that is assigned by the believed costs."""
    batch = slice(ranks * batch_size)
    rank = assign(believed[batch], ranks).rank_of_sample
    true = np.bincount(rank, weights=cost(lengths)[batch])
    return float(true.max() / true.mean())


class Histories(Dataset[Tensor]):
    """Synthetic histories, in which the last item and the stride of the history determine the next item."""

    def __init__(self, users: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.empty(users).log_normal_(4, 1.3, generator=draw).clamp(8, 2_000).long()
        self.starts = torch.randint(ITEMS, (users,), generator=draw)
        self.strides = torch.randint(1, 4, (users,), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, user: int) -> Tensor:
        """Return the items, shape ``[length + 1]``."""
        return (self.starts[user] + self.strides[user] * torch.arange(self.lengths[user] + 1)) % ITEMS


def collate(histories: list[Tensor]) -> KeyedJaggedTensor:
    """Return all items except the last one as ``item``, the next items of recent ones as ``next``, and others as ``other``."""
    items, nexts = [history[:-1] for history in histories], [history[1:][-RECENT:] for history in histories]
    others = [(each * 31 + 17) % ITEMS for each in nexts]
    values = [*items, *nexts, *others]
    return KeyedJaggedTensor(
        keys=["item", "next", "other"], values=torch.cat(values), lengths=torch.tensor([len(each) for each in values])
    )


class CompressedHistory(L.LightningModule):
    """Predicts the next item of each recent item of a history."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item", "next", "other"])
        self.tables = EmbeddingCollection(tables=[table])
        self.queries = nn.Parameter(torch.randn(TOKENS, DIM) * DIM**-0.5)
        self.read = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.better = MeanMetric()

    def forward(self, items: list[Tensor]) -> Tensor:
        """Return the prediction of each recent item, shape ``[recent items of all samples, DIM]``, from rows of items."""
        recent = [each[-RECENT:] for each in items]
        x = torch.cat([self.compress([each[:-RECENT] for each in items]), pad_sequence(recent, batch_first=True)], dim=1)
        # every item attends to the tokens, which precede all recent items; padding is last, so the causal mask hides it
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        seen = self.layer(x, src_mask=later, is_causal=True)[:, TOKENS:]
        return torch.cat([each[: len(part)] for each, part in zip(seen, recent)])

    def compress(self, old: list[Tensor]) -> Tensor:
        """Return the results of the queries, shape ``[samples, TOKENS, DIM]``, one history at a time to avoid padding."""
        none = self.queries.new_zeros(1, DIM)  # attention needs at least one key
        read = [torch.cat([none, each])[None] for each in old]
        return torch.cat([self.read(self.queries[None], each, each, need_weights=False)[0] for each in read]) + self.queries

    def rate(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the score of each recent item's next item minus that of another item."""
        rows = self.tables(batch)
        predicted = self(rows["item"].values().split(batch["item"].lengths().tolist()))
        return (predicted * (rows["next"].values() - rows["other"].values())).sum(1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's targets, which are the next items of recent items."""
        loss = -nn.functional.logsigmoid(self.rate(batch)).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        """Update the share of next items with the higher score."""
        self.better.update((self.rate(batch) > 0).float())
        self.log("better", self.better, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the table."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Train with the cost function, and print the imbalance with and without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--users", type=int, default=2_000)
    options = parser.parse_args()
    L.seed_everything(0)
    train = Histories(options.users)
    lengths = train.lengths.numpy()
    data = FreeScaleDataModule(
        train, lengths, 16, cost=cost, collate_fn=collate, loss_reduction="target_mean",
        target_counts=np.minimum(lengths, RECENT), val_dataset=Histories(200, seed=1),
    )  # fmt: skip
    trainer = L.Trainer(
        strategy="freescale", accelerator="auto", devices=2, max_epochs=options.epochs, callbacks=[BubbleProfiler()],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(CompressedHistory(), data)
    whole = CostModel.from_config(dim=DIM, layers=1, heads=2)(lengths)
    for name, believed in {"attention over all": whole, "the compressed model": cost(lengths)}.items():
        trainer.print(f"imbalance on 8 ranks, assigned by the cost of {name}: {imbalance(lengths, believed):.3f}")
    trainer.print("better:", round(trainer.callback_metrics["better"].item(), 3))


if __name__ == "__main__":
    main()
