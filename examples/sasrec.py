"""SASRec over a plain ``nn.Embedding``: from a file of ratings to a served model.

``python examples/sasrec.py`` trains on two ranks, whose table of items is sharded, saves an ordinary checkpoint, loads it into
the plain module, and asks it what to recommend. With ``--loss ce`` the loss is a softmax over all items. Source: Kang and
McAuley, Self-Attentive Sequential Recommendation (arXiv 1808.09781).
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.losses import catalogue_cross_entropy
from lightning_freescale.metrics import RankingMetrics, target_ranks

RATINGS = Path(__file__).parent / "data" / "ml-latest-small" / "ratings.csv.gz"
PADDING = 0  # items are counted from 1


def collate(samples: list[dict[str, Any]], num_items: int) -> dict[str, Tensor]:
    """Histories side by side, their next items, and as many that were not.

    Returns:
        ``ids``, int64 ``[3, samples, longest]``: items, targets and negatives, which is what the table is asked for; in
        evaluation only items are there. ``target``, int64 ``[samples]``, in evaluation.
    """
    items = [torch.from_numpy(sample["item"]) + 1 for sample in samples]
    history = pad_sequence(items, batch_first=True, padding_value=PADDING)
    targets = [torch.from_numpy(sample["target"]) + 1 for sample in samples]
    if len(targets[0]) != len(items[0]):
        return {"ids": history[None], "target": torch.cat(targets)}
    # what is drawn follows from the histories, so that every run draws the same
    draw = torch.Generator().manual_seed(zlib.crc32(history.numpy().tobytes()))
    negative = torch.randint(1, num_items + 1, history.shape, generator=draw) * (history != PADDING)
    return {"ids": torch.stack([history, pad_sequence(targets, batch_first=True, padding_value=PADDING), negative])}


class SASRec(L.LightningModule):
    """Predicts every next item of a history by causal self-attention.

    Args:
        num_items: rows of the item table, beside that of the padding.
        max_length: the longest history.
        dim: width of embeddings and layers.
        layers: number of attention layers.
        heads: attention heads per layer.
        dropout: everywhere.
        loss: ``"bce"``, against one item that was not next, or ``"ce"``, over all items.
    """

    def __init__(
        self,
        num_items: int,
        max_length: int = 200,
        dim: int = 48,
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        loss: str = "bce",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items = nn.Embedding(num_items + 1, dim, padding_idx=PADDING)
        nn.init.normal_(self.items.weight, std=dim**-0.5)
        self.positions = nn.Embedding(max_length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, dim, dropout, batch_first=True, norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.LayerNorm(dim)
        self.scores, self.loss = RankingMetrics(top_k=10), loss

    def forward(self, rows: Tensor, known: Tensor) -> Tensor:
        """What each position predicts, ``[samples, longest, dim]``, from item rows of that shape and which are no padding."""
        longest = rows.shape[1]
        x = rows * self.items.embedding_dim**0.5 + self.positions.weight[:longest]
        later = torch.ones(longest, longest, dtype=torch.bool, device=rows.device).triu(1)
        return self.norm(self.layers(x, mask=later, src_key_padding_mask=~known, is_causal=True))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the rank's targets."""
        known = batch["ids"][0] != PADDING
        if self.loss == "ce":
            predicted = self(self.items(batch["ids"][0]), known)[known]
            loss = catalogue_cross_entropy(predicted, self.items.weight[1:], batch["ids"][1][known] - 1)
        else:
            rows, target, negative = self.items(batch["ids"])
            predicted = self(rows, known)[known]
            better = (predicted * target[known]).sum(1), (predicted * negative[known]).sum(1)
            loss = -(nn.functional.logsigmoid(better[0]) + nn.functional.logsigmoid(-better[1])).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """All items once; every rank asks for them, so all take part in the exchange."""
        self.catalogue = self.items(torch.arange(self.items.num_embeddings, device=self.device))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Rank the held-out item among all items the user has not seen."""
        self.scores.update(target_ranks(self.rate(batch["ids"][0]), batch["target"]))
        self.log_dict(self.scores, on_epoch=True, prog_bar=True)

    def rate(self, history: Tensor) -> Tensor:
        """How well each item, padding and those already seen last, would be next; shape ``[samples, num_items + 1]``."""
        known = history != PADDING
        last = known.sum(1) - 1
        states = self(self.catalogue[history], known)[torch.arange(len(history)), last]
        return (
            (states @ self.catalogue.T)
            .scatter(1, history, float("-inf"))
            .index_fill(1, last.new_tensor([PADDING]), float("-inf"))
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for all; the sharded table follows it."""
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98))


def main() -> None:
    """Train, save, load, serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--loss", choices=["bce", "ce"], default="bce", help="bce: one negative; ce: softmax over all items")
    parser.add_argument("--out", type=Path, default=Path("sasrec.ckpt"), help="the checkpoint (default: sasrec.ckpt)")
    options = parser.parse_args()
    L.seed_everything(0)
    columns = {"user": "userId", "item": "movieId", "time": "timestamp", "order": "sort", "ties": "keep"}
    data = FreeScaleDataModule.from_interactions(RATINGS, **columns, max_length=options.max_length, batch_size=32)
    num_items = data.histories.num_items
    data.collate_fn = lambda samples: collate(samples, num_items)
    model = SASRec(num_items, options.max_length, loss=options.loss)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(shard=["items"]), accelerator="auto", devices=2, max_epochs=options.epochs,
        callbacks=[BubbleProfiler()], logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, data)
    trainer.save_checkpoint(options.out)
    if trainer.is_global_zero:
        serve(options.out, data)


def serve(checkpoint: Path, data: FreeScaleDataModule) -> None:
    """What the plain module, which knows nothing of ranks, recommends to the first user."""
    model = SASRec.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    history = torch.from_numpy(data.predict_dataset[0]["item"][None]) + 1
    with torch.no_grad():
        model.on_validation_epoch_start()
        best = model.rate(history).topk(10).indices[0] - 1
    print("recommended to the first user, by the file's ids:", data.histories.item_ids[best].tolist())


if __name__ == "__main__":
    main()
