"""Long histories compressed into a few learned tokens, and what that makes of a sample's cost.

``python examples/compressed_history.py`` trains on two ranks. The older part of a history is read once, by learned queries that
attend over it; recent items attend to each other and to what the queries have found, as in personalized sequence compression
(PerSRec). So the old part costs in proportion to its length, and only the recent one by its square. The default cost, that of
attention over the whole history, would be wrong here: the data module is told this model's own.
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
RECENT, TOKENS = 64, 8  # items that stay as they are; what stands for all before them


def cost(lengths: NDArray[Any]) -> NDArray[Any]:
    """Multiply-adds of :class:`CompressedHistory` for samples of these lengths, same shape; padding aside."""
    recent = np.minimum(lengths, RECENT)
    old = lengths - recent
    attended = recent + TOKENS
    read = old * (2 * DIM**2 + 2 * TOKENS * DIM)  # keys, values and scores of each old item, once
    return read + attended * 12 * DIM**2 + 2 * DIM * attended**2


def imbalance(lengths: NDArray[Any], believed: NDArray[Any], ranks: int = 8, batch_size: int = 32) -> float:
    """Max over ranks / mean of the true cost, where one global batch was assigned by a believed one."""
    batch = slice(ranks * batch_size)
    rank = assign(believed[batch], ranks).rank_of_sample
    true = np.bincount(rank, weights=cost(lengths)[batch])
    return float(true.max() / true.mean())


class Histories(Dataset[Tensor]):
    """Made-up histories: the next item follows from the last, and from a stride that the whole history has."""

    def __init__(self, users: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.empty(users).log_normal_(4, 1.3, generator=draw).clamp(8, 2_000).long()
        self.starts = torch.randint(ITEMS, (users,), generator=draw)
        self.strides = torch.randint(1, 4, (users,), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, user: int) -> Tensor:
        """``[length + 1]`` items."""
        return (self.starts[user] + self.strides[user] * torch.arange(self.lengths[user] + 1)) % ITEMS


def collate(histories: list[Tensor]) -> KeyedJaggedTensor:
    """All items but the last as ``item``; of the recent ones those that follow, and as many that do not."""
    items, nexts = [history[:-1] for history in histories], [history[1:][-RECENT:] for history in histories]
    others = [(each * 31 + 17) % ITEMS for each in nexts]
    values = [*items, *nexts, *others]
    return KeyedJaggedTensor(
        keys=["item", "next", "other"], values=torch.cat(values), lengths=torch.tensor([len(each) for each in values])
    )


class CompressedHistory(L.LightningModule):
    """Predicts what follows each recent item of a history."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item", "next", "other"])
        self.tables = EmbeddingCollection(tables=[table])
        self.queries = nn.Parameter(torch.randn(TOKENS, DIM) * DIM**-0.5)
        self.read = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.better = MeanMetric()

    def forward(self, items: list[Tensor]) -> Tensor:
        """What each recent item predicts, ``[recent items of all samples, DIM]``, from each history's rows."""
        recent = [each[-RECENT:] for each in items]
        x = torch.cat([self.compress([each[:-RECENT] for each in items]), pad_sequence(recent, batch_first=True)], dim=1)
        # the tokens stand before all recent items, so a causal mask lets every item see them; padding comes last, unseen
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        seen = self.layer(x, src_mask=later, is_causal=True)[:, TOKENS:]
        return torch.cat([each[: len(part)] for each, part in zip(seen, recent)])

    def compress(self, old: list[Tensor]) -> Tensor:
        """``[samples, TOKENS, DIM]``: what the queries find, one history at a time, so that nothing is padded."""
        none = self.queries.new_zeros(1, DIM)  # there is always something to attend to
        read = [torch.cat([none, each])[None] for each in old]
        return torch.cat([self.read(self.queries[None], each, each, need_weights=False)[0] for each in read]) + self.queries

    def rate(self, batch: KeyedJaggedTensor) -> Tensor:
        """How much better each recent item's next one is rated than one that does not follow."""
        rows = self.tables(batch)
        predicted = self(rows["item"].values().split(batch["item"].lengths().tolist()))
        return (predicted * (rows["next"].values() - rows["other"].values())).sum(1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        """The mean over the rank's targets, which are its recent items."""
        loss = -nn.functional.logsigmoid(self.rate(batch)).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        """How often the next item is rated better."""
        self.better.update((self.rate(batch) > 0).float())
        self.log("better", self.better, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all; the table follows it."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Say what the cost function is worth, and train with it."""
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
