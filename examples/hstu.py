"""An HSTU-style sequence recommender on jagged tensors: an ordinary LightningModule with a TorchRec EmbeddingCollection.

Source: Zhai et al., Actions Speak Louder than Words (HSTU, arXiv 2402.17152).
"""

from __future__ import annotations

import zlib
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.data import collate_histories
from lightning_freescale.metrics import RankingMetrics, target_ranks

POSITIONS, TIMES = 16, 40  # buckets of the relative bias, by powers of two
QUERIES = 128  # attention processes a history in blocks of this many queries, each with its past only


class CollateWithNegatives:
    """Collates histories and draws negatives for training, so that the batch contains all ids of its step.

    The negatives only depend on the histories of the batch. They are the same in every run, with any number of workers, and
    after a resume.

    Args:
        num_items: number of items, from which negatives are drawn uniformly.
        negatives: number of negatives, which the samples of a batch share.
    """

    def __init__(self, num_items: int, negatives: int = 512) -> None:
        self.num_items, self.negatives = num_items, negatives

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of ``collate_histories``, and in training also ``ids``, the ids of all lookups."""
        batch = collate_histories(samples)
        items, target = batch["features"].values(), batch["target"]
        if len(target) != len(items):
            return batch  # evaluation ranks all items
        return {**batch, "ids": item_ids(items, batch["features"].lengths(), target, self.draw(items))}

    def draw(self, items: Tensor) -> Tensor:
        """Return the negatives of a batch with these histories."""
        seed = zlib.crc32(items.numpy().tobytes())
        return torch.randint(0, self.num_items, (self.negatives,), generator=torch.Generator().manual_seed(seed))


def item_ids(items: Tensor, lengths: Tensor, target: Tensor, negative: Tensor) -> KeyedJaggedTensor:
    """Return one lookup for histories, their targets and negatives. The negatives belong to the first sample."""
    with_first = torch.zeros_like(lengths)
    with_first[0] = len(negative)
    return KeyedJaggedTensor(
        keys=["item", "target", "negative"],
        values=torch.cat([items, target, negative]),
        lengths=torch.cat([lengths, lengths if len(target) else torch.zeros_like(lengths), with_first]),
    )


class Block:
    """A block of queries of one history and all keys that they see. ``scale`` averages over the visible keys."""

    def __init__(self, start: int, times: Tensor) -> None:
        end = min(start + QUERIES, len(times))
        query, key = torch.arange(start, end, device=times.device), torch.arange(end, device=times.device)
        distance = query[:, None] - key[None, :]
        gap = (times[start:end, None] - times[None, :end]).clamp_(min=0)
        near = torch.log2(distance.clamp(min=0) + 1.0).int().clamp_(max=POSITIONS - 1)
        recent = torch.log2(gap + 1.0).int().clamp_(max=TIMES - 1)
        self.queries, self.keys = slice(start, end), slice(0, end)
        self.buckets = (near * TIMES + recent).flatten()
        self.scale = (distance >= 0) / (query[:, None] + 1.0)


class Jagged:
    """The lengths of the histories of a batch, and the blocks of all their pairs of positions. All layers share it."""

    def __init__(self, lengths: list[int], times: Tensor) -> None:
        self.lengths = lengths
        self.blocks = [[Block(start, t) for start in range(0, len(t), QUERIES)] for t in times.split(lengths)]


class HSTUBlock(nn.Module):
    """Pointwise SiLU attention with a relative position and time bias, gated by U, without padding and softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.gate_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.position_bias = nn.Parameter(torch.zeros(POSITIONS))
        self.time_bias = nn.Parameter(torch.zeros(TIMES))

    def forward(self, x: Tensor, jagged: Jagged) -> Tensor:
        """Return the output for ``x``. Both have shape ``[total length, dim]``."""
        u, v, q, k = nn.functional.silu(self.uvqk(self.norm(x))).chunk(4, dim=1)
        bias = (self.position_bias[:, None] + self.time_bias[None, :]).flatten()
        parts = zip(*(t.unflatten(1, (self.heads, -1)).transpose(0, 1).split(jagged.lengths, dim=1) for t in (q, k, v)))
        attended = [self._attend(*part, bias, block) for part, blocks in zip(parts, jagged.blocks) for block in blocks]
        mixed = torch.cat(attended, dim=1).transpose(0, 1).flatten(1)
        return x + self.out(self.gate_norm(mixed) * u)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, block: Block) -> Tensor:
        """Attend within one history. ``q``, ``k`` and ``v`` have shape ``[heads, length, dim / heads]``."""
        scores = q[:, block.queries] @ k[:, block.keys].transpose(1, 2)
        scores = scores + bias.index_select(0, block.buckets).view_as(block.scale)
        return (nn.functional.silu(scores) * block.scale) @ v[:, block.keys]


class HSTURecommender(L.LightningModule):
    """Predicts each next item of a history, on batches of :class:`CollateWithNegatives`.

    Args:
        num_items: number of rows of the item table.
        dim: width of embeddings and blocks.
        layers: number of HSTU blocks.
        heads: number of attention heads per block.
        dropout: dropout of the input embeddings.
        lr: learning rate of the dense part (AdamW).
        item_lr: learning rate of the item table (row-wise Adagrad, applied in backward).
    """

    def __init__(
        self,
        num_items: int,
        dim: int = 64,
        layers: int = 2,
        heads: int = 2,
        dropout: float = 0.2,
        lr: float = 2e-3,
        item_lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_items, self.lr = num_items, lr
        table = EmbeddingConfig(
            name="item", num_embeddings=num_items, embedding_dim=dim, feature_names=["item", "target", "negative"]
        )
        self.items = EmbeddingCollection(tables=[table])
        apply_optimizer_in_backward(RowWiseAdagrad, self.items.parameters(), {"lr": item_lr})
        self.blocks = nn.ModuleList(HSTUBlock(dim, heads) for _ in range(layers))
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(dim)
        self.scores = nn.ModuleDict({stage: RankingMetrics(top_k=10, prefix=f"{stage}_") for stage in ("val", "test")})

    def forward(self, items: Tensor, lengths: list[int], times: Tensor) -> Tensor:
        """Return the prediction of each position from the item embeddings. Both have shape ``[total length, dim]``."""
        x, jagged = self.dropout(items), Jagged(lengths, times)
        for block in self.blocks:
            x = block(x, jagged)
        return self.norm(x)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss over all targets of the rank: a softmax over the target and shared negatives."""
        target, lengths = batch["target"], batch["features"].lengths()
        found, negative = self.items(batch["ids"]), batch["ids"]["negative"].values()
        predicted = self(found["item"].values(), lengths.tolist(), batch["time"])
        positive = (predicted * found["target"].values()).sum(dim=1, keepdim=True)
        others = predicted @ found["negative"].values().T
        others = others.masked_fill(negative[None, :] == target[:, None], float("-inf"))
        loss = -nn.functional.log_softmax(torch.cat([positive, others], dim=1), dim=1)[:, 0].mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Rank the held-out item among all items the user has not seen."""
        self._score("val", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Rank the held-out item among all items the user has not seen."""
        self._score("test", batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the ten best unseen items of each user, shape ``[samples, 10]``."""
        return self._rate(batch).topk(10, dim=1).indices

    def on_validation_epoch_start(self) -> None:
        """Look up all items once. All ranks do so, because the exchange is collective."""
        self._catalogue()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the dense part. The item table has a separate one."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _catalogue(self) -> None:
        every = torch.arange(self.num_items, device=self.device)
        with torch.no_grad():
            length = torch.tensor([self.num_items], dtype=torch.int32, device=self.device)
            self.catalogue = self.items(item_ids(every, length, every[:0], every[:0]))["item"].values()

    def _rate(self, batch: dict[str, Any]) -> Tensor:
        lengths = batch["features"].lengths().tolist()
        history, ends = batch["features"].values(), torch.tensor(lengths, device=self.device).cumsum(0) - 1
        rated = self(self.catalogue[history], lengths, batch["time"])[ends] @ self.catalogue.T
        rows = torch.arange(len(lengths), device=self.device).repeat_interleave(torch.tensor(lengths, device=self.device))
        rated[rows, history] = float("-inf")
        return rated

    def _score(self, stage: str, batch: dict[str, Any]) -> None:
        metric = self.scores[stage]
        metric.update(target_ranks(self._rate(batch), batch["target"]))
        self.log_dict(metric, on_epoch=True, prog_bar=True)
