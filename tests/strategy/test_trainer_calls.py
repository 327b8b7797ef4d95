"""Calls of the Trainer and of Lightning's methods besides training steps."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import RankBatches, Recommender, Samples, collate, trainer


@dataclass
class Settings:
    width: int = 3


class WithSettings(Recommender):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.save_hyperparameters()


class LogsValues(L.LightningModule):
    """Each rank has another number of samples of its own value."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.layer, self.count = torch.nn.Linear(1, 1), counts[int(os.environ["RANK"])]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._log("trained")
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log("validated")

    def _log(self, name: str) -> None:
        self.log(name, float(self.count), on_epoch=True, sync_dist=True, batch_size=self.count)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _logged(counts: list[int]) -> dict[str, float]:
    fitting = trainer(strategy="freescale", devices=len(counts), max_epochs=1)
    loaders = [DataLoader(torch.ones(2, 1)) for _ in range(2)]
    fitting.fit(LogsValues(counts), *loaders)
    return {name: value.item() for name, value in fitting.callback_metrics.items() if name in ("trained_epoch", "validated")}


def test_logged_means_weigh_unequal_numbers_of_samples() -> None:
    counts = [2, 1, 5]
    mean = sum(count * count for count in counts) / sum(counts)
    for logged in run_distributed(_logged, 3, counts, init=False):
        assert logged == {"trained_epoch": pytest.approx(mean), "validated": pytest.approx(mean)}


def _gathered(sizes: list[int]) -> list[int]:
    class Gathers(LogsValues):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            gathered = self.all_gather(self.layer(torch.ones(self.count, 1)), sync_grads=True)
            self.shape = list(gathered.shape)
            return gathered.sum()

    model = Gathers(sizes)
    trainer(strategy="freescale", devices=len(sizes), max_steps=1).fit(model, DataLoader(torch.ones(2, 1)))
    return model.shape


def _refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"all_gather.*\[\(2, 1\), \(3, 1\)\].*drop_last=True"):
        _gathered(sizes)


def test_gathering_unequal_numbers_of_samples_is_refused_on_every_rank() -> None:
    assert run_distributed(_gathered, 2, [2, 2], init=False) == [[2, 2, 1]] * 2
    run_distributed(_refused, 2, [2, 3], init=False)


def _resumed(folder: Path) -> int:
    def run(**options: Any) -> L.Trainer:
        loader = DataLoader(RankBatches(int(os.environ["RANK"]), 3), batch_size=None)
        fitting = trainer(strategy="freescale", devices=2, **{"max_epochs": 1, **options})
        path = folder / "last.ckpt"
        resume = {"ckpt_path": path, "weights_only": False} if path.exists() else {}
        fitting.fit(WithSettings(Settings()), loader, **resume)
        fitting.save_checkpoint(path)
        fitting.predict(WithSettings(Settings()), loader, ckpt_path=path, weights_only=False)
        return fitting

    run()
    return run(max_epochs=2).global_step


def test_a_checkpoint_with_objects_is_read_where_the_call_allows_it(tmp_path: Path) -> None:
    assert run_distributed(_resumed, 2, tmp_path, init=False) == [6, 6]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_strategy_can_be_copied_before_a_fit(copied: Any) -> None:
    def losses(strategy: FreeScaleStrategy) -> list[float]:
        torch.manual_seed(0)
        model = Recommender()
        trainer(strategy=strategy, devices=1, max_epochs=1).fit(model, DataLoader(RankBatches(0, 2), batch_size=None))
        return model.losses

    made = FreeScaleStrategy(dedup=False, checkpoint="async")
    twin = copied(made)
    assert run_distributed(losses, 1, twin, init=False) == run_distributed(losses, 1, made, init=False)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.of_batches: dict[int, float] = {}
        self.of_epoch: dict[int, float] = {}

    def write_on_batch_end(self, trainer: Any, module: Any, predicted: Tensor, indices: Any, *rest: Any) -> None:
        self.of_batches |= zip(indices, predicted.tolist(), strict=True)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        for indices, predicted in zip(batch_indices[0], predictions, strict=True):
            self.of_epoch |= zip(indices, predicted.tolist(), strict=True)


def _written(workers: int) -> tuple[dict[int, float], dict[int, float]]:
    samples, writer = Samples(23), Writer()
    torch.manual_seed(0)
    options = {"batch_size": 3, "collate_fn": collate, "num_workers": workers}
    data = FreeScaleDataModule(samples, lengths=samples.lengths, predict_dataset=samples, **options)
    ranks = int(os.environ["WORLD_SIZE"])
    trainer(strategy="freescale", devices=ranks, callbacks=[writer]).predict(Recommender(), data)
    return writer.of_batches, writer.of_epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_prediction_writers_get_the_numbers_of_the_samples(workers: int) -> None:
    ((expected, _),) = run_distributed(_written, 1, 0, init=False)
    assert sorted(expected) == list(range(23))
    ranks = run_distributed(_written, 2, workers, init=False)
    for kind in range(2):
        first, second = (rank[kind] for rank in ranks)
        assert not first.keys() & second.keys()
        assert first | second == pytest.approx(expected, rel=1e-5)
