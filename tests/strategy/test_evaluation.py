"""Validation, test and prediction: as under "ddp", also where ranks have different numbers of batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel
from tests.helpers.recommender import RankBatches, trainer

RANKS = 3
Batch = dict[str, Any]


class Uneven(IterableDataset):
    """The data of this rank; ``counts`` are the numbers of batches by rank."""

    def __init__(self, *counts: int) -> None:
        self.rank = int(os.environ["RANK"])
        self.batches = RankBatches(self.rank, counts[self.rank]).batches

    def __iter__(self) -> Any:
        yield from self.batches


class Sized(Uneven):
    def __len__(self) -> int:
        return len(self.batches)


class Evaluates(CountingModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.epochs: list[float] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = torch.nn.functional.mse_loss(self.net(batch["features"]), batch["label"])
        self.seen.append(loss.item())
        # one sample each: Lightning averages over ranks the numbers of samples, and truncates
        self.log("loss", loss, sync_dist=True, batch_size=1, reduce_fx="max")

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.epochs.append(self.all_gather(torch.tensor(float(len(self.seen)))).sum().item())
        strategy = self.trainer.strategy
        with strategy.evaluation() if isinstance(strategy, FreeScaleStrategy) else nullcontext(), torch.no_grad():
            self.seen += [self.net(batch["features"]).sum().item() for batch in Uneven(0, 2, 1)]
        strategy.barrier()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(batch["features"])


def _evaluated(strategy: Callable[[], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, fitting = Evaluates(), trainer(strategy=strategy(), devices=RANKS, max_epochs=2, num_sanity_val_steps=1)
    fitting.fit(model, DataLoader(RankBatches(int(os.environ["RANK"]), 3), batch_size=None), _loaders())
    found: dict[str, Any] = {"trained": [model.losses, model.seen, model.epochs]}
    for name, evaluate in {"validate": fitting.validate, "test": fitting.test}.items():
        metrics = evaluate(model, _loaders(), verbose=False)
        found[name] = [metrics, model.seen, model.epochs]
    limited = trainer(strategy=strategy(), devices=RANKS, limit_predict_batches=3)
    found["predicted"] = [each.tolist() for each in fitting.predict(model, _loader(Uneven(4, 2, 1)))]
    found["limited"] = [each.tolist() for each in limited.predict(Evaluates(), _loader(Sized(4, 2, 1)))]
    return found


def _loader(batches: Uneven) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def _loaders() -> list[DataLoader]:
    return [_loader(Uneven(2, 4, 1)), _loader(Sized(3, 1, 2))]


@cache
def _under_ddp() -> list[dict[str, Any]]:
    return run_distributed(_evaluated, RANKS, lambda: "ddp", init=False)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"shard": "auto", "dedup": False}])
def test_as_under_ddp(options: dict[str, Any]) -> None:
    found = run_distributed(_evaluated, RANKS, lambda: FreeScaleStrategy(**options), init=False)
    for rank, (ours, theirs) in enumerate(zip(found, _under_ddp(), strict=True)):
        assert ours.keys() == theirs.keys()
        for name, numbers in theirs.items():
            torch.testing.assert_close(ours[name], numbers, rtol=1e-5, atol=1e-6, msg=f"rank {rank}, {name}")
