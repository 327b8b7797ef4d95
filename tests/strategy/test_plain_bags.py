"""FreeScaleStrategy(shard=...): plain nn.EmbeddingBags as under "ddp"."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import EPOCHS, PLAIN, STEPS, Case, CountingModel, continued, departures, fit_all
from tests.helpers.recommender import tables

CLOSE = {"losses": (1e-6, 1e-12), "weights": (1e-6, 1e-6), "states": (1e-6, 1e-6)}
ROWS, DIM, SAMPLES = 40, 6, 4
SHARD = {"shard": ["sums", "means", "fixed", "weighted", "late", "most", "doubled.embeddings.cat"]}


class Doubled(EmbeddingCollection):
    """Computes something else than its base class, but its tables are embeddings like others."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return {name: 2 * found.values() for name, found in super().forward(features).items()}


class Bags(CountingModel):
    """Pools rows in all ways. Two modules share a weight, and one is frozen."""

    kind = nn.Identity

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.means = nn.EmbeddingBag(ROWS, DIM, include_last_offset=True)
        self.fixed = nn.EmbeddingBag(ROWS, DIM)
        self.weighted, self.again = (nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(2))
        self.again.weight = self.weighted.weight
        self.late = nn.EmbeddingBag.from_pretrained(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM))
        self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.doubled = Doubled(tables=tables()[1:])
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, ROWS))
        self.over = nn.Linear((6 + twice) * DIM + 8, 1, bias=False)

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        ids, offsets = batch["ids"], batch["offsets"]
        found = [
            self.sums(ids, offsets[:-1]),
            self.means(input=ids, offsets=offsets),
            self.fixed(batch["fixed"]),
            self.weighted(ids, offsets[:-1], per_sample_weights=self.factors[ids]),
            self.late(batch["fixed"].int()),
            self.most(ids, offsets[:-1]),
            self.doubled(batch["features"])["category"],
        ]
        if self.twice:
            found.append(self.again(batch["fixed"], per_sample_weights=self.factors[batch["fixed"]]))
        return self.over(torch.tanh(torch.cat(found, dim=1))).squeeze(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.scores(batch), batch["label"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05, eps=1e-2)


def _loader() -> DataLoader:
    batches, draw = [], torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (SAMPLES,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids, fixed = (torch.randint(0, ROWS, shape, generator=draw) for shape in ((int(lengths.sum()),), (SAMPLES, 3)))
        kinds, ones = torch.randint(0, 13, (SAMPLES,), generator=draw), torch.ones(SAMPLES, dtype=torch.int64)
        features = KeyedJaggedTensor(["category"], kinds, lengths=ones)
        label = torch.rand(SAMPLES, generator=draw)
        batches.append({"ids": ids, "offsets": offsets, "fixed": fixed, "features": features, "label": label})
    return DataLoader(batches, batch_size=None)


BAGS = Case(Bags, _loader, {"max_epochs": EPOCHS}, notice=None)
ONCE = Case(partial(Bags, twice=False), _loader, {"max_epochs": 1}, notice=None)
"""TorchRec updates a table once per lookup."""


def _fits(path: Path) -> dict[str, list[Any]]:
    runs = fit_all({"bags": BAGS}, "ddp", SHARD) | fit_all({"by torchrec": ONCE}, "ddp", {**SHARD, **PLAIN})
    return runs | {"to ddp": continued(BAGS, str(path / "bags.ckpt"), STEPS, SHARD, "ddp")}


def test_plain_bags_train_as_with_ddp(tmp_path: Path) -> None:
    ranks = run_distributed(_fits, 2, tmp_path)
    steps, first, known = STEPS * EPOCHS, EPOCHS + 1, 7  # lookups of a step whose ids are in the batch; `late` converts its ids
    cases = dict.fromkeys(ranks[0], BAGS)
    cases["bags"] = replace(BAGS, ahead=(known * (steps - first), known * first + steps, 0), notice="'late'")
    assert departures(cases, ranks, **CLOSE) == []
    initial, weights = Bags().state_dict(), ranks[0]["bags"][1].weights
    assert [key for key in weights if torch.equal(weights[key], initial[key])] == ["late.weight"]
