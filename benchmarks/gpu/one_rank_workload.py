"""Models that part_host_time and part_model train: the reference model, and one with few kernels, on long-tailed histories."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from hstu import CollateWithNegatives, HSTURecommender

Batch = dict[str, Any]
FEATURES = ["item", "target", "negative"]


@dataclass(frozen=True)
class Workload:
    """Rows of the item table, width, layers and heads of the model, histories of a batch, and items of the longest one."""

    items: int
    dim: int
    layers: int
    heads: int
    histories: int
    longest: int
    negatives: int = 512


CPU = Workload(items=2_000, dim=16, layers=1, heads=2, histories=4, longest=40, negatives=16)
GPU_QUICK = Workload(items=1_000_000, dim=128, layers=2, heads=4, histories=32, longest=256)
GPU = Workload(items=5_000_000, dim=128, layers=4, heads=4, histories=64, longest=512)


def of_size(on_gpu: bool, quick: bool) -> Workload:
    """Return the workload for a machine."""
    return CPU if not on_gpu else GPU_QUICK if quick else GPU


class HSTU(HSTURecommender):
    """The model of ``examples/``: attention history by history, in many small kernels."""

    def __init__(self, load: Workload) -> None:
        super().__init__(1, load.dim, load.layers, load.heads, dropout=0.0)
        self.num_items = load.items
        table = EmbeddingConfig(name="item", num_embeddings=load.items, embedding_dim=load.dim, feature_names=FEATURES)
        # on the meta device: TorchRec makes the table where it will be
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.items.parameters(), {"lr": 0.1})


class Attention(nn.Module):
    """SASRec's block: causal softmax attention and two linear layers, on padded histories."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states; input and result have shape ``[histories, longest, dim]``."""
        parts = self.qkv(self.before(x)).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)  # padding comes last: unseen
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class SASRec(HSTU):
    """A model like SASRec: attention over padded histories in few kernels, without synchronization of host and GPU."""

    def __init__(self, load: Workload) -> None:
        super().__init__(load)
        self.blocks = nn.ModuleList(Attention(load.dim, load.heads) for _ in range(load.layers))
        self.longest = load.longest
        self.position = nn.Parameter(torch.zeros(load.longest, load.dim))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the softmax loss over the target and shared negatives, of all positions."""
        found = self.items(self.looked_up(batch))
        x = found["item"].to_padded_dense(self.longest) + self.position
        for block in self.blocks:
            x = block(x)
        predicted = self.norm(x).flatten(0, 1).index_select(0, batch["positions"])
        positive = (predicted * found["target"].values()).sum(dim=1, keepdim=True)
        scores = torch.cat([positive, predicted @ found["negative"].values().T], dim=1)
        return -nn.functional.log_softmax(scores, dim=1)[:, 0].mean()

    def looked_up(self, batch: Batch) -> KeyedJaggedTensor:
        """Return the ids that the model looks up."""
        return batch["ids"]


class Unforeseen(SASRec):
    """SASRec with ids that are not in its batches, so the strategy cannot predict them."""

    def looked_up(self, batch: Batch) -> KeyedJaggedTensor:
        """Return the ids of the batch less 1."""
        ids = batch["ids"]
        return KeyedJaggedTensor(
            ids.keys(), ids.values() - 1, lengths=ids.lengths(), length_per_key=ids.length_per_key_or_none()
        )


class Loader:
    """Batches that already exist."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def batches(load: Workload, count: int, pin: bool) -> list[Batch]:
    """Return batches of the example's collate function, with ``positions``: the places of items among the padded ones."""
    collate = CollateWithNegatives(load.items, load.negatives)
    made = [_batch(load, collate, np.random.default_rng(step)) for step in range(count)]
    return [{name: value.pin_memory() for name, value in batch.items()} for batch in made] if pin else made


def shifted(made: list[Batch]) -> list[Batch]:
    """Return the batches of :class:`Unforeseen`."""

    def higher(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values = ids.values() + 1
        values = values.pin_memory() if ids.values().is_pinned() else values
        return KeyedJaggedTensor(keys=ids.keys(), values=values, lengths=ids.lengths())

    return [{**batch, "ids": higher(batch["ids"])} for batch in made]


def _batch(load: Workload, collate: CollateWithNegatives, draw: np.random.Generator) -> Batch:
    lengths = draw.lognormal(np.log(load.longest / 6), 0.8, load.histories).clip(2, load.longest).astype(int)
    samples = []
    for user, length in enumerate(lengths):
        items = (draw.zipf(1.2, length + 1) * 2_654_435_761 % load.items).astype(np.int64)  # popular rows lie anywhere
        times = draw.integers(1, 100_000, length).cumsum()
        samples.append({"item": items[:-1], "time": times, "target": items[1:], "user": user})
    starts = torch.arange(load.histories) * load.longest
    positions = torch.cat([start + torch.arange(length) for start, length in zip(starts, lengths.tolist())])
    return {**collate(samples), "positions": positions}
