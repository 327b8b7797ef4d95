"""Features of Lightning's Trainer give the same results under "freescale" as under "ddp", as the table in the docs says."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import MicroBatches
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from tests.docs.pages import DOCS, ROOT
from tests.helpers.bags import BagModel, bag_loader
from tests.helpers.overlap_training import my_loader
from tests.helpers.plain_embeddings import SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import Recommender, Samples, collate, trainer

STEPS = 3
Case = Callable[[Any], Any]
"""Trains with a strategy on the ranks of ``run_distributed``, in an empty folder, and returns what must be equal."""
FAST: dict[str, Case] = {}
SLOW: dict[str, Case] = {}
ELSEWHERE = {
    "`WeightAveraging`, `EMAWeightAveraging`": "strategy/test_weight_averaging.py",
    "`StochasticWeightAveraging`": "strategy/test_validation.py",
    "`ModelPruning` of tables": "strategy/test_validation.py",
    "`overfit_batches`": "strategy/test_validation.py",
}
"""The features with tests in other files."""


def case(feature: str, cases: dict[str, Case] = FAST) -> Callable[[Case], Case]:
    def add(fn: Case) -> Case:
        cases[feature] = fn
        return fn

    return add


def fit(strategy: Any, module: Any = None, loader: Any = None, validation: Any = None, **options: Any) -> Any:
    """Fit, and return the Trainer and the module."""
    module = module or Recommender("adagrad")
    fitting = trainer(**{"devices": 2, "strategy": strategy, "num_sanity_val_steps": 0, **options})
    fitting.fit(module, my_loader(STEPS) if loader is None else loader, validation)
    return fitting, module


def logged(folder: str, name: str) -> list[float]:
    """Return the values of a metric in the order of the CSVLogger's file."""
    with (Path(folder) / "metrics.csv").open() as rows:
        return [float(row[name]) for row in csv.DictReader(rows) if row.get(name)]


@case("`EarlyStopping`")
def early_stopping(strategy: Any) -> Any:
    stops = callbacks.EarlyStopping("val", min_delta=0.05, patience=1)
    fitting, module = fit(strategy, validation=my_loader(2), max_epochs=20, callbacks=[stops])
    assert 1 < fitting.current_epoch < 20
    return fitting.current_epoch, module.losses, stops.best_score


class OnPlateau(Recommender):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


@case("`ReduceLROnPlateau`")
def plateau(strategy: Any) -> Any:
    fitting, module = fit(strategy, OnPlateau("adagrad"), validation=my_loader(2), max_epochs=4)
    rates = [group["lr"] for group in fitting.optimizers[0].param_groups]
    assert rates != [0.1]
    return rates, module.losses


class Summary(callbacks.ModelSummary):
    """Keeps what it would print, without the types of the modules."""

    shown: Any = ()

    def summarize(self, data: Any, *totals: Any, **_: Any) -> None:
        types = dict(data).pop("Type")
        self.shown = [column for column in data if column[0] != "Type"], totals
        self.types = set(types)


@case("`ModelSummary`")
def summary(strategy: Any) -> Any:
    bags = BagModel("sgd")
    bags.weighted.requires_grad_(False)
    plain = strategy if strategy == "ddp" else FreeScaleStrategy(shard=SHARDED)
    tied = PlainModel()
    tied.head = nn.Linear(*reversed(tied.encoder.item_emb.weight.shape), bias=False)
    tied.head.weight = tied.encoder.item_emb.weight
    shown = []
    for module, loader, way in ((bags, bag_loader(1), strategy), (tied, plain_loader(1), plain)):
        callback = Summary(max_depth=-1)
        fit(way, module, loader, callbacks=[callback], enable_model_summary=True)
        shown.append(callback.shown)
        assert not callback.shown or strategy == "ddp" or callback.types & {"ShardedTable", "ShardedEmbedding"}
    return shown


def _throughput(folder: str, strategy: Any, data: Any, size: Callable[[Any], int]) -> list[float]:
    monitor = callbacks.ThroughputMonitor(size, length_fn=lambda batch: 100 * size(batch), window_size=2)
    logger = CSVLogger(folder, "", "")
    fit(strategy, None, data, callbacks=[monitor], logger=logger, log_every_n_steps=1, max_epochs=2)
    return [] if int(os.environ["RANK"]) else logged(folder, "train/samples")


def _size(batch: Any) -> int:
    assert not isinstance(batch, MicroBatches)
    return len(batch["label"])


@case("`ThroughputMonitor`")
def throughput(strategy: Any) -> Any:
    samples = Samples(48)
    for number, options in enumerate(({"balance": BalanceOptions(assignment_mode="free")}, {"micro_batches": 2})):
        if strategy == "freescale":
            data = FreeScaleDataModule(samples, samples.lengths, 6, collate_fn=collate, **options)
            counts = {tuple(data.sampler(0, 2).counts(step)) for step in range(4)}
            assert (counts == {(6, 6)}) == (number == 1)
            found = _throughput(f"{number}", strategy, data, _size)
            # half of the samples of both ranks
            assert found in ([], [6.0 * (step + 1) for step in range(8)]), found
    return _throughput("equal", strategy, my_loader(STEPS), _size)


class Jumps(Recommender):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1000 if self.global_step == 2 else 1)


@case("`SpikeDetection`")
def spike(strategy: Any) -> Any:
    module, detection = Jumps("adagrad"), callbacks.SpikeDetection(window=2, exclude_batches_path="./skip.json")
    with pytest.raises(TrainingSpikeException):
        fit(strategy, module, callbacks=[detection])
    return module.losses, detection.bad_batches


@case("`ModelPruning` of other modules")
def pruning(strategy: Any) -> Any:
    module = Recommender("adagrad")
    pruned = module.net.hidden[0]
    callback = callbacks.ModelPruning("l1_unstructured", parameters_to_prune=[(pruned, "weight")], amount=0.5)
    fit(strategy, module, callbacks=[callback], max_epochs=2)
    return module.losses, (pruned.weight == 0).sum()


class Normed(Recommender):
    """Trains with a batch norm in evaluation mode, because torch's synchronized one needs a GPU in training mode."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.norm, self.kinds = nn.BatchNorm1d(4), []
        nn.init.normal_(self.norm.running_mean)

    def on_train_start(self) -> None:
        self.norm.eval()
        self.kinds.append(type(self.norm))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.norm(self.net(batch["features"])[:4].unsqueeze(0)).square().mean()


@case("`sync_batchnorm`")
def sync_batchnorm(strategy: Any) -> Any:
    # DistributedDataParallel refuses synchronized layers on the CPU
    with patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle"):
        _, module = fit(strategy, Normed(), sync_batchnorm=True)
    assert module.kinds == [nn.SyncBatchNorm] and not isinstance(module.norm, nn.SyncBatchNorm)
    return module.losses, type(module.norm), module.norm.state_dict()


class TwoValidations(Recommender):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


@case("several validation loaders")
def validation_loaders(strategy: Any) -> Any:
    fitting, module = fit(strategy, TwoValidations("adagrad"), validation=[my_loader(2), my_loader(STEPS)])
    found = {name: value for name, value in fitting.callback_metrics.items() if name.startswith("val")}
    assert len(found) == 2
    return found, module.losses


class TakesOne(Recommender):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step(next(part for part in batch.values() if part is not None), batch_idx)


def combined(mode: str) -> Case:
    def train(strategy: Any) -> Any:
        loader = CombinedLoader({"short": my_loader(2), "long": my_loader(STEPS)}, mode)
        return fit(strategy, TakesOne("adagrad"), loader)[1].losses

    return train


case("`CombinedLoader`, `max_size_cycle`", SLOW)(combined("max_size_cycle"))
case("`CombinedLoader`, `min_size`", SLOW)(combined("min_size"))
case("`CombinedLoader`, `max_size`", SLOW)(combined("max_size"))


@case("`check_val_every_n_epoch`")
def check_val(strategy: Any) -> Any:
    steps: list[int] = []
    watch = callbacks.LambdaCallback(on_validation_end=lambda trainer, module: steps.append(trainer.global_step))
    options = {"validation": my_loader(1), "max_epochs": 3, "callbacks": [watch]}
    _, every_second = fit(strategy, check_val_every_n_epoch=2, **options)
    _, by_steps = fit(strategy, check_val_every_n_epoch=None, val_check_interval=2, **options)
    assert steps == [6, 2, 4, 6, 8]
    return every_second.losses, by_steps.losses


@case("`save_weights_only`", SLOW)
def weights_only(strategy: Any) -> Any:
    saves = callbacks.ModelCheckpoint(".", filename="end", save_weights_only=True)
    fit(strategy, callbacks=[saves], enable_checkpointing=True)
    checkpoint = torch.load("end.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    validating = trainer(devices=2, strategy=strategy)
    (metrics,) = validating.validate(Recommender(), my_loader(2), ckpt_path="end.ckpt", verbose=False)
    return checkpoint["state_dict"], metrics


@case("`AsyncCheckpointIO`", SLOW)
def async_checkpoint(strategy: Any) -> Any:
    saves = callbacks.ModelCheckpoint(".", filename="end")
    fit(strategy, callbacks=[saves], enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    torch.distributed.barrier()  # rank 0 has waited for the file at the end of the fit
    checkpoint = torch.load("end.ckpt", weights_only=False)
    return checkpoint["state_dict"], checkpoint["optimizer_states"]


@case("`DeviceStatsMonitor`", SLOW)
def device_stats(strategy: Any) -> Any:
    monitor = callbacks.DeviceStatsMonitor(cpu_stats=False)
    return fit(strategy, callbacks=[monitor], logger=CSVLogger("stats"))[1].losses


class TwoRates(Recommender):
    def configure_optimizers(self) -> Any:
        rates = [(self.net.embeddings, 0.1), (self.net.hidden, 0.2)]
        optimizer = torch.optim.Adagrad([{"params": list(part.parameters()), "lr": rate} for part, rate in rates])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@case("`LearningRateMonitor`", SLOW)
def learning_rates(strategy: Any) -> Any:
    monitor = callbacks.LearningRateMonitor("step")
    _, module = fit(strategy, TwoRates(), callbacks=[monitor], logger=CSVLogger("rates"), log_every_n_steps=1)
    return monitor.lrs, module.losses


@case("`Timer`, `max_time`", SLOW)
def max_time(strategy: Any) -> Any:
    """The number of steps depends on the time, but all ranks must end at the same one."""
    steps = torch.tensor([fit(strategy, max_time={"seconds": 1}, max_epochs=100_000)[0].global_step])
    highest = steps.clone()
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    assert steps == highest > STEPS


@case("`barebones`", SLOW)
def barebones(strategy: Any) -> Any:
    module, options = Recommender("adagrad"), {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
    L.Trainer(strategy=strategy, barebones=True, max_epochs=1, **options).fit(module, my_loader(STEPS))
    return module.losses


@case("`detect_anomaly`", SLOW)
def anomaly(strategy: Any) -> Any:
    return fit(strategy, detect_anomaly=True)[1].losses


@case("`deterministic`", SLOW)
def deterministic(strategy: Any) -> Any:
    try:
        return fit(strategy, deterministic=True)[1].losses
    finally:
        torch.use_deterministic_algorithms(False)


class Writer(callbacks.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        self.written.append((prediction, rest[2:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, *rest: Any) -> None:
        self.written.append(predictions)


@case("`limit_predict_batches`, `BasePredictionWriter`", SLOW)
def predictions(strategy: Any) -> Any:
    writer = Writer()
    found = trainer(devices=2, strategy=strategy, limit_predict_batches=2, callbacks=[writer]).predict(
        Recommender(), my_loader(STEPS)
    )
    assert len(found) == 2 and len(writer.written) == 3
    return found, writer.written


def _unequal(cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Return on this rank which features differ between the strategies, with the results of both."""
    found = {}
    for number, (feature, train) in enumerate(cases.items()):
        results = []
        for strategy in ("ddp", "freescale"):
            (place := folder / f"{number} {strategy}").mkdir(exist_ok=True)
            os.chdir(place)
            torch.manual_seed(0)
            try:
                results.append(train(strategy))
            except Exception as error:
                raise RuntimeError(f"{feature} under {strategy!r}") from error
        found |= {} if _same(*results) else {feature: results}
    return found


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(expected[key], found[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_same, expected, found))
    if isinstance(expected, (float, Tensor)):
        return torch.allclose(*(torch.as_tensor(each).double() for each in (found, expected)), rtol=1e-5, atol=1e-6)
    return bool(found == expected)


@pytest.mark.parametrize("cases", [pytest.param(FAST, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)])
def test_features_are_as_under_ddp(cases: dict[str, Case], tmp_path: Path) -> None:
    assert run_distributed(_unequal, 2, cases, tmp_path) == [{}, {}]


def test_the_table_in_the_docs_lists_the_tested_features() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| `tests/(.+)` \|$", (DOCS / "lightning_features.md").read_text(), re.MULTILINE)
    assert dict(rows) == dict.fromkeys(FAST | SLOW, "lightning/test_features.py") | ELSEWHERE
    assert all((ROOT / "tests" / path).exists() for _, path in rows)
