"""Steps that only look up, by our exchange and by TorchRec's: sequences, short bags and long bags.

``python benchmarks/netlab.py --hosts 2 --rate 10gbit -- python benchmarks/lookups.py``

TorchRec pools bags at the owners of the rows. Our exchange sends each row once to every rank that needs it, and pools there.
Both variants take turns in the same processes on the same batches, under the Trainer. A round of a variant is a training epoch
and a validation epoch of a new model. The ratio of a round is our median step over TorchRec's median step.

sequences   2 features of one table, 64 histories of about 25 ids per rank and step, 64 columns
short bags  8 tables of 32 columns, 256 samples of about 2 ids per feature
long bags   8 tables of 32 columns, 64 samples of about 50 ids per feature

``--compute-ms`` adds a sleep to each training step: a third of it after the lookup, the rest before the lookup's backward.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal, TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import lightning as L
import numpy as np
import overlap_variants
import torch
import torch.distributed as dist
from demo import quiet
from harness import finish_on_all_ranks, parser
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_freescale import FreeScaleStrategy

KINDS = {"sequences": (["a", "b"], 64, 25), "short_bags": ([f"f{i}" for i in range(8)], 256, 2)}
KINDS["long_bags"] = (KINDS["short_bags"][0], 64, 50)
"""Features, samples per rank and step, and mean ids per sample and feature."""
ROWS = {"sequences": 100_000, "short_bags": 20_000, "long_bags": 20_000}
"""Rows of a table."""
Overlap: TypeAlias = Literal["torchrec"] | bool
OVERLAPS: tuple[Overlap, ...] = ("torchrec", True)
SKIPPED = 8
"""Steps at the beginning of an epoch, while the lookahead fills."""


def main() -> None:
    """Run on all ranks."""
    add = (options := parser(__doc__)).add_argument
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--compute-ms", type=float, default=0.0)
    add("--steps", type=int, default=40, help="steps of an epoch (default: 40)")
    add("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    quiet()
    figures: dict[str, float] = {}
    for kind in given.kinds:
        figures |= _ratios(kind, given)
    finish_on_all_ranks(figures, given)


class Lookups(L.LightningModule):
    """Tables and a dense part of one weight."""

    def __init__(self, kind: str, seconds: float) -> None:
        super().__init__()
        features, rows = KINDS[kind][0], ROWS[kind]
        if kind == "sequences":
            sequence = EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=features)
            self.tables: Any = EmbeddingCollection(tables=[sequence])
        else:
            bags = [EmbeddingBagConfig(name=f, num_embeddings=rows, embedding_dim=32, feature_names=[f]) for f in features]
            self.tables = EmbeddingBagCollection(tables=bags)
        self.dense, self.seconds = nn.Linear(1, 1), seconds
        self.began: dict[str, list[float]] = {"train": [], "validate": []}

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        """Look up, and compute."""
        self.began["train"].append(time.perf_counter())
        rows = overlap_variants.compute(self.rows_of(batch), None, self.seconds)
        return rows.sum() * 1e-3 + self.dense(torch.ones(1)).sum()

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        """Look up."""
        self.began["validate"].append(time.perf_counter())
        self.rows_of(batch)

    def rows_of(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return rows of sequences, or pooled rows of bags."""
        found = self.tables(batch)
        return found["a"].values() if isinstance(found, dict) else found.values()

    def configure_optimizers(self) -> Any:
        """Return SGD for all parameters."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches(kind: str, steps: int) -> list[KeyedJaggedTensor]:
    """Return the batches of this rank; few rows are popular."""
    features, samples, ids = KINDS[kind]
    draw, found = np.random.default_rng(int(os.environ["RANK"])), []
    for _ in range(steps):
        lengths = draw.integers(1, 2 * ids, (len(features), samples)).reshape(-1)
        values = (ROWS[kind] * draw.random(lengths.sum()) ** 4).astype(np.int64)
        found.append(KeyedJaggedTensor(features, torch.from_numpy(values), lengths=torch.from_numpy(lengths)))
    return found


def _ratios(kind: str, given: Any) -> dict[str, float]:
    batches = _batches(kind, given.steps)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(given.rounds):
        for overlap in OVERLAPS[:: 1 if number % 2 else -1]:
            for phase, began in _epoch(kind, overlap, batches, given.compute_ms / 1e3).items():
                times.setdefault((phase, overlap), []).append(1e3 * float(np.median(np.diff(began)[SKIPPED:])))
    figures = {}
    for phase in ("train", "validate"):
        mean = torch.tensor([times[phase, each] for each in OVERLAPS], dtype=torch.float64)
        dist.all_reduce(mean)
        torchrec, ours = (mean / dist.get_world_size()).numpy()
        low, ratio, high = np.quantile(ours / torchrec, [0.25, 0.5, 0.75])
        name = f"{kind}_{phase}"
        figures |= {f"{name}_torchrec_ms": float(np.median(torchrec)), f"{name}_ms": float(np.median(ours))}
        figures |= {f"{name}_ratio": float(ratio), f"{name}_ratio_low": float(low), f"{name}_ratio_high": float(high)}
        if dist.get_rank() == 0:
            print(
                f"{kind:<11}{phase:<9} TorchRec {np.median(torchrec):7.2f} ms, ours {np.median(ours):7.2f} ms, "
                f"ratio {ratio:.2f} (half of the rounds within {low:.2f} to {high:.2f})",
                flush=True,
            )
    return figures


def _epoch(kind: str, overlap: Overlap, batches: list[KeyedJaggedTensor], seconds: float) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = Lookups(kind, seconds)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(overlap=overlap), accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=1, num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    loaders = [DataLoader(batches, batch_size=None) for _ in range(2)]
    trainer.fit(model, *loaders)
    return model.began


if __name__ == "__main__":
    main()
