"""SASRec with a plain ``nn.Embedding``, from a file of ratings to recommendations.

``python examples/sasrec.py`` trains on two ranks with a sharded table of items, saves an ordinary checkpoint, loads it into the
plain module, and prints recommendations. With ``--loss ce``, the loss is a softmax over all items. Source: Kang and McAuley,
Self-Attentive Sequential Recommendation (arXiv 1808.09781).
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
PADDING = 0  # items start at 1


def collate(samples: list[dict[str, Any]], num_items: int) -> dict[str, Tensor]:
    """Return a padded batch of histories with targets and negatives.

    Returns:
        In training, ``ids``: items, targets and negatives, int64 of shape ``[3, samples, longest]``. In evaluation, ``ids``:
        items of shape ``[1, samples, longest]``, and ``target``, int64 of shape ``[samples]``.
    """
    items = [torch.from_numpy(sample["item"]) + 1 for sample in samples]
    history = pad_sequence(items, batch_first=True, padding_value=PADDING)
    targets = [torch.from_numpy(sample["target"]) + 1 for sample in samples]
    if len(targets[0]) != len(items[0]):
        return {"ids": history[None], "target": torch.cat(targets)}
    # the seed depends on the histories, so that every run draws the same negatives
    draw = torch.Generator().manual_seed(zlib.crc32(history.numpy().tobytes()))
    negative = torch.randint(1, num_items + 1, history.shape, generator=draw) * (history != PADDING)
    return {"ids": torch.stack([history, pad_sequence(targets, batch_first=True, padding_value=PADDING), negative])}


class SASRec(L.LightningModule):
    """Predicts each next item of a history by causal self-attention.

    Args:
        num_items: number of items; the table has one more row for padding.
        max_length: length of the longest history.
        dim: width of embeddings and layers.
        layers: number of attention layers.
        heads: number of attention heads per layer.
        dropout: dropout of all layers.
        loss: ``"bce"``, with one negative per target, or ``"ce"``, a softmax over all items.
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
        """Return the prediction of each position from item rows, both of shape ``[samples, longest, dim]``."""
        longest = rows.shape[1]
        x = rows * self.items.embedding_dim**0.5 + self.positions.weight[:longest]
        later = torch.ones(longest, longest, dtype=torch.bool, device=rows.device).triu(1)
        return self.norm(self.layers(x, mask=later, src_key_padding_mask=~known, is_causal=True))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's targets."""
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
        """Look up all items once. All ranks do so, because the exchange is collective."""
        self.catalogue = self.items(torch.arange(self.items.num_embeddings, device=self.device))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Rank the held-out item among all items the user has not seen."""
        self.scores.update(target_ranks(self.rate(batch["ids"][0]), batch["target"]))
        self.log_dict(self.scores, on_epoch=True, prog_bar=True)

    def rate(self, history: Tensor) -> Tensor:
        """Return the scores of next items, shape ``[samples, num_items + 1]``; padding and seen items have -inf."""
        known = history != PADDING
        last = known.sum(1) - 1
        states = self(self.catalogue[history], known)[torch.arange(len(history)), last]
        return (
            (states @ self.catalogue.T)
            .scatter(1, history, float("-inf"))
            .index_fill(1, last.new_tensor([PADDING]), float("-inf"))
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the sharded table."""
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98))


def main() -> None:
    """Train, save a checkpoint, load it, and print recommendations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--loss", choices=["bce", "ce"], default="bce", help="bce: one negative; ce: softmax over all items")
    parser.add_argument("--out", type=Path, default=Path("sasrec.ckpt"), help="path of the checkpoint (default: sasrec.ckpt)")
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
    """Print the recommendations of the plain module to the first user."""
    model = SASRec.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    history = torch.from_numpy(data.predict_dataset[0]["item"][None]) + 1
    with torch.no_grad():
        model.on_validation_epoch_start()
        best = model.rate(history).topk(10).indices[0] - 1
    print("recommended to the first user, by the file's ids:", data.histories.item_ids[best].tolist())


if __name__ == "__main__":
    main()
