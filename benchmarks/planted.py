"""A training run with planted causes of bubbles, each optional; ``what_if.py`` and ``verdicts.py`` profile it.

It runs under ``netlab.py`` with one rank on each host. Compute is a sleep, a third of it in forward. All samples have the same
number of ids, so compute and exchange are independent.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy

SETTINGS = ("ddp", "exchange waited for", "exchange overlapped", "overlapped, 2 micro-batches")
BATCH, ROWS, DIM, EXPONENT = 8, 1_000_000, 64, 1.05
WARMUP = 4
TOKENS = 200
"""Length of a sample of mean cost."""


@dataclass(frozen=True)
class Planted:
    """The properties of all steps of a run.

    Attributes:
        compute: seconds of a mean step.
        spread: sigma of the logarithm of samples' costs; 0 for equal ones.
        even: True if each rank has the mean cost of the ranks' samples instead.
        slow: factor of the compute of rank 1.
        loader: seconds to read a batch.
        workers: workers of the loader, which read beside compute.
        host: seconds in a hook.
        ids: ids of a sample, whose rows are exchanged; under "ddp" there is no table.
        dense_kib: size of the dense gradients.
    """

    compute: float = 0.24
    spread: float = 0.0
    even: bool = False
    slow: float = 1.0
    loader: float = 0.0
    workers: int = 0
    host: float = 0.0
    ids: int = 4
    dense_kib: int = 2


class Samples(Dataset[tuple[Tensor, float]]):
    """The ids and the cost of each sample; the mean cost is 1."""

    def __init__(self, planted: Planted, steps: int, world: int) -> None:
        random, count = np.random.default_rng(3), steps * world * BATCH
        cost = random.lognormal(-(planted.spread**2) / 2, planted.spread, count).clip(0.05, 8)
        if planted.even:
            cost = cost.reshape(steps, -1).mean(axis=1).repeat(world * BATCH)
        self.cost, self.seconds = cost, planted.loader / BATCH
        self.lengths = np.maximum(1, np.round(cost * TOKENS)).astype(int)
        popularity = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -EXPONENT)
        drawn = np.searchsorted(popularity, random.random((count, planted.ids)) * popularity[-1])
        self.ids = torch.from_numpy(random.permutation(ROWS)[drawn])

    def __len__(self) -> int:
        return len(self.cost)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        time.sleep(self.seconds)
        return self.ids[index], float(self.cost[index])


def _collate(samples: list[tuple[Tensor, float]]) -> dict[str, Any]:
    ids, cost = zip(*samples)
    lengths = torch.tensor([len(each) for each in ids]).int()
    return {"item": KeyedJaggedTensor(["item"], torch.cat(ids), lengths=lengths), "cost": torch.tensor(cost)}


class _Compute(torch.autograd.Function):
    """The identity, which sleeps a third of the seconds in forward and the rest in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * 2 / 3
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(L.LightningModule):
    """A table of items if it is sharded, dense weights, and compute that sleeps."""

    def __init__(self, planted: Planted, has_table: bool) -> None:
        super().__init__()
        self.planted = planted
        if has_table:
            config = EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="item", feature_names=["item"])
            self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.dense = torch.nn.Parameter(torch.zeros(planted.dense_kib * 256 // DIM, DIM))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep the host busy."""
        time.sleep(self.planted.host)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Look up and compute."""
        slow = self.planted.slow if self.global_rank == 1 else 1.0
        rows = self.items(batch["item"])["item"].values() if hasattr(self, "items") else torch.ones(1, DIM, requires_grad=True)
        rows = rows + self.dense.mean()  # before all compute, so its gradient comes last and nothing hides it
        rows = _Compute.apply(rows, slow * self.planted.compute * float(batch["cost"].sum()) / BATCH)
        return rows.square().mean()

    def configure_optimizers(self) -> Any:
        """Return row-wise Adagrad for the table; the dense weights stay unchanged."""
        table = self.items.parameters() if hasattr(self, "items") else [self.dense]
        return RowWiseAdagrad(table, lr=0.1)


def profile(setting: str, planted: Planted, steps: int) -> dict[str, Any]:
    """Train on all ranks of the process group, which the first call creates; return the report's document on rank 0."""
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    samples = Samples(planted, steps + WARMUP, world)
    data = FreeScaleDataModule(
        samples, samples.lengths, BATCH, cost=lambda lengths: lengths, collate_fn=_collate, balance=False, shuffle=False,
        num_workers=planted.workers,
        micro_batches=2 if "micro-batches" in setting else 1,
    )  # fmt: skip
    strategy: Any = "ddp" if setting == "ddp" else FreeScaleStrategy(overlap="overlapped" in setting or "torchrec")
    with TemporaryDirectory() as folder:
        profiler = BubbleProfiler(folder, every_n_steps=10, trace_steps=0, verbose=False)
        profiler.options = replace(profiler.options, warmup_steps=WARMUP)
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, num_nodes=world, max_epochs=1, callbacks=[profiler],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Sleeper(planted, has_table=setting != "ddp"), data)
        return json.loads(profiler.files["report"].read_text()) if trainer.is_global_zero else {}


def be_quiet() -> None:
    """Suppress Lightning's notices of each fit."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def as_row(planted: Planted) -> dict[str, Any]:
    """Return the fields that differ from the defaults."""
    usual = asdict(Planted())
    return {name: value for name, value in asdict(planted).items() if value != usual[name]}
