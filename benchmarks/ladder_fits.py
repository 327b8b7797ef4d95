"""Fits of the ladder: histories, a model that sleeps, and Lightning's Trainer with the options of a rung."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import end_to_end
import lengths
import lightning as L
import numpy as np
import overlap_workload
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalanceOptions

RUNGS: dict[str, dict[str, Any]] = {
    "floor": {"balance": True, "overlap": "torchrec"},
    "plain": {"overlap": "torchrec"},
    "balance": {"balance": True},
    "overlap": {"overlap": True, "hot_rows": 0},
    "dedup": {"dedup": True},
    "split": {"split_backward": True},
    "window": {"micro_batches": 2},
    "hot-rows": {"hot_rows": "auto", "rerank_every_n_steps": 50},
}
"""What each adds to those before it; the floor and plain stand for themselves."""


@dataclass(frozen=True)
class Archetype:
    """The properties of a training run.

    Attributes:
        attention: share of a mean history's compute that grows with the square of its length.
        tables: number of tables; all look up all items.
        dim: width of their rows.
        batch: histories per rank and step.
        family: distribution of the lengths, see ``lengths.py``; those of ``--data`` if not given.
    """

    attention: float = 0.5
    tables: int = 1
    dim: int = 64
    batch: int = 32
    family: str | None = None


ARCHETYPES = {
    "middle": Archetype(),
    "compute-heavy": Archetype(attention=0.9, dim=8),
    "embedding-heavy": Archetype(attention=0.0, tables=4, batch=64, family="short"),
}


class Histories(Dataset[Tensor]):
    """The items of one history in each table for each sample, shape ``[tables, length]``, drawn from its index."""

    def __init__(self, kind: Archetype, options: Any) -> None:
        self.lengths, self.cost = drawn_lengths(kind, options)
        random = np.random.default_rng(overlap_workload.SEED)
        popularity = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -overlap_workload.EXPONENT)
        place = random.permutation(options.rows)  # the popular ones are anywhere in the table
        drawn = random.random((kind.tables, int(self.lengths.sum()))) * popularity[-1]
        ids = torch.from_numpy(place[np.searchsorted(popularity, drawn)])
        self._ids = ids.split(self.lengths.tolist(), dim=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index]


def drawn_lengths(kind: Archetype, options: Any) -> tuple[NDArray[np.int64], CostModel]:
    """Return the length of each history, and a cost by which a mean batch takes ``--compute-ms``; both shares by the mean."""
    samples = (options.steps + end_to_end.SKIPPED) * kind.batch * int(os.environ["WORLD_SIZE"])
    random = np.random.default_rng(overlap_workload.SEED + 1)
    if kind.family is not None:
        drawn = lengths.draw_lengths(kind.family, random, samples)
    else:
        _, known = lengths.read_lengths(overlap_workload.RATINGS if options.data is None else options.data)
        drawn = random.choice(known, samples)
    mean, square = float(drawn.mean()), float((drawn.astype(np.float64) ** 2).mean())
    seconds = options.compute_ms / 1000 / kind.batch
    cost = CostModel(linear=seconds * (1 - kind.attention) / mean, quadratic=seconds * kind.attention / square)
    return drawn.astype(np.int64), cost


class Sleeper(end_to_end.Sleeper):
    """Sleeps as long as the cost model says, and looks up all tables."""

    def __init__(self, kind: Archetype, cost: CostModel, options: Any, exchanges: bool) -> None:
        super().__init__(options, 0.0, exchanges)
        self._cost, self._keys = cost, _keys(kind)
        if exchanges:
            tables = [
                EmbeddingConfig(num_embeddings=options.rows, embedding_dim=kind.dim, name=key, feature_names=[key])
                for key in self._keys
            ]
            self.items = EmbeddingCollection(tables=tables, device=torch.device("meta"))

    def seconds_of(self, batch: KeyedJaggedTensor) -> float:
        """Return the compute by the lengths of the histories."""
        samples = batch.lengths()[: batch.stride()]
        return float(self._cost(samples.double().numpy()).sum())

    def rows_of(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the sum of the rows of all tables."""
        found = self.items(batch)
        return sum((found[key].values() for key in self._keys if key in found), torch.zeros(()))


def _keys(kind: Archetype) -> list[str]:
    return ["item", *(f"item_{number}" for number in range(1, kind.tables))]


@dataclass(frozen=True)
class Fit:
    """The measurements of a fit: seconds of each step on this rank. Rank 0 also has shares of all ranks' time."""

    wall: NDArray[np.float64]
    compute: NDArray[np.float64]
    shares: dict[str, float]
    collision_rate: float | None


def fit(name: str, kind: Archetype, data: Histories, options: Any, number: int) -> Fit:
    choices = _choices(name)
    torch.manual_seed(0)
    options.dim, options.variants = kind.dim, options.rungs
    model = Sleeper(kind, data.cost, options, exchanges=name != "floor")
    module = FreeScaleDataModule(
        data, data.lengths, kind.batch, cost=data.cost, collate_fn=lambda samples: _collate(samples, kind), seed=number,
        balance=choices.pop("balance", False) and BalanceOptions(assignment_mode="slack"), loss_reduction="target_mean",
        micro_batches=choices.pop("micro_batches", 1),
    )  # fmt: skip
    strategy = FreeScaleStrategy(**choices)
    profiler = BubbleProfiler(mkdtemp(), verbose=False)
    profiler.options = replace(profiler.options, warmup_steps=end_to_end.SKIPPED)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[profiler],
    )  # fmt: skip
    trainer.fit(model, datamodule=module)
    first = end_to_end.SKIPPED
    overlap = strategy.overlap_report
    return Fit(
        wall=np.diff(model.began)[first - 1 : -1],
        compute=np.array(model.computed[first - 1 : -2]),
        shares={} if profiler.report is None else dict(profiler.report.shares),
        collision_rate=None if overlap is None else overlap.collision_rate,
    )


def _choices(name: str) -> dict[str, Any]:
    """Return the options of a rung, which include those of the rungs before it."""
    rungs = list(RUNGS)
    climbed = rungs[1 : rungs.index(name) + 1] if name != "floor" else ["floor"]
    choices = {key: value for rung in climbed for key, value in RUNGS[rung].items()}
    if choices["overlap"] != "torchrec":
        choices.setdefault("dedup", False)
    return choices


def _collate(samples: list[Tensor], kind: Archetype) -> KeyedJaggedTensor:
    lengths_of = torch.tensor([each.shape[1] for each in samples]).int().repeat(kind.tables)
    return KeyedJaggedTensor(_keys(kind), torch.cat(samples, dim=1).flatten(), lengths=lengths_of)
