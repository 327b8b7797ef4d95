"""fit, validate, test and predict under FreeScaleStrategy, compared with "ddp", for modules of all kinds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardedModule
from torchrec.models.dlrm import SparseArch

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.embeddings.shards import kernels
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import Case, CountingModel, Run, assert_same, departures, fit_all
from tests.helpers.recommender import ITEMS, REPEATS, Net, Recommender, Samples, collate, fixed_loader, tables, trainer


def _data(samples: int = 37, **options: Any) -> FreeScaleDataModule:
    data = Samples(samples)
    stages = {stage: Samples(samples, seed=1) for stage in ("val_dataset", "test_dataset", "predict_dataset")}
    return FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, **stages, **{**REPEATS, **options})


def _all_stages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("freescale", "ddp"):
        torch.manual_seed(0)
        found[strategy] = torch.cat(trainer(strategy=strategy, devices=2).predict(Recommender(), _data()))
    torch.manual_seed(0)
    module, fit = Recommender("adagrad"), trainer(devices=2, max_epochs=2)
    fit.fit(module, _data())
    assert isinstance(module.net.embeddings, ShardedModule)
    found["validated"] = fit.validate(module, _data(), verbose=False)[0]["val"]
    found["tested"] = fit.test(module, _data(), verbose=False)[0]["test"]
    return found | {"predicted": fit.predict(module, _data())}


def test_prediction_before_a_fit_and_all_stages_after_it() -> None:
    """Validation sees what training left."""
    ranks = run_distributed(_all_stages, 2)
    for found in ranks:
        assert_same(found["freescale"], found["ddp"])
        assert found["validated"] == ranks[0]["validated"] == pytest.approx(found["tested"])
    assert sum(len(batch) for found in ranks for batch in found["predicted"]) == 37


# -- the same numbers as "ddp"


class Groups(CountingModel):
    """Tables in parameter groups of their own with learning-rate schedules of their own, one of them frozen at last."""

    def configure_optimizers(self) -> Any:
        item, cat = self.net.embeddings.embeddings["item"], self.net.embeddings.embeddings["cat"]
        optimizer = torch.optim.Adagrad(
            [
                {"params": self.net.hidden.parameters(), "lr": 0.1},
                {"params": item.parameters(), "lr": 0.2, "initial_accumulator_value": 0.0},
                {"params": cat.parameters(), "lr": 0.2},
            ],
            initial_accumulator_value=0.1,
        )
        factors = [lambda step: 0.9**step, lambda step: 0.8**step, lambda step: float(step < 3)]  # equal at first
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Squares(CountingModel):
    """Its loss is the mean square of what ``look_up`` finds in ``net``."""

    def __init__(self, net: nn.Module, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.net = net

    def look_up(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.net(features)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.look_up(batch["features"]).square().mean()
        self.losses.append(loss.item())
        return loss


class Alone(Squares):
    def __init__(self) -> None:
        super().__init__(EmbeddingCollection(tables=tables()), "sgd")

    def look_up(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.net(features)["history"].values()


class OneRow(Squares):
    """Its table has one row, so row-wise sharding would leave a rank without; and it is called by keyword."""

    def __init__(self) -> None:
        config = EmbeddingConfig(name="one", num_embeddings=1, embedding_dim=8, feature_names=["history"])
        super().__init__(EmbeddingCollection(tables=[config]))

    def look_up(self, features: KeyedJaggedTensor) -> torch.Tensor:
        history = features["history"]
        zeros = torch.zeros_like(history.values())
        return self.net(features=KeyedJaggedTensor(["history"], zeros, lengths=history.lengths()))["history"].values()


class OwnCollection(EmbeddingCollection):
    """A collection that cannot be sharded."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return super().forward(features)


class OwnKind(CountingModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.embeddings = OwnCollection(tables=tables())


class Dense(Squares):
    def look_up(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.net(features.values()[:, None] / 50)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def _in_model() -> Squares:
    """Return a module whose collection is inside one of TorchRec's own models."""
    config = EmbeddingBagConfig(name="bag", num_embeddings=50, embedding_dim=8, feature_names=["history"])
    return Squares(SparseArch(EmbeddingBagCollection(tables=[config])))


def _case(make: Callable[[], Any], **options: Any) -> Case:
    return Case(make, lambda: _data(64), {"max_epochs": 1, "limit_val_batches": 0, **options}, notice=None)


CLOSE_CASES = {
    "groups": _case(Groups),
    "no dense parameters": _case(Alone),
    "fewer rows than ranks": _case(OneRow),
    "in a model of TorchRec": _case(_in_model, max_steps=3),
}
EXACT_CASES = {
    "another collection": _case(OwnKind),
    "no collection": _case(lambda: Dense(nn.Linear(1, 1)), accumulate_grad_batches=2, gradient_clip_val=1.0),
}
CLOSE = {"losses": (1e-5, 0.0), "weights": (1e-5, 1e-6), "states": (1e-5, 1e-6)}


def test_trains_as_ddp() -> None:
    ranks = run_distributed(fit_all, 2, CLOSE_CASES | EXACT_CASES, "ddp_find_unused_parameters_true", {})
    assert departures(CLOSE_CASES, ranks, **CLOSE) == []
    assert departures(EXACT_CASES, ranks) == []
    for rank, runs in enumerate(ranks):
        warned = {name for name, (_, run) in runs.items() for text in run.warnings if "'net.embeddings' " in text}
        assert warned == ({"another collection"} if rank == 0 else set())


def _several_fits() -> dict[str, list[Run]]:
    """Fit a module, one of whose tables is frozen, by a Trainer, by the same one again, and by another one."""
    runs = []
    for strategy in ("ddp", "freescale"):
        torch.manual_seed(0)
        module = CountingModel()
        module.net.embeddings.embeddings["item"].requires_grad_(False)
        first, other = (trainer(strategy=strategy, devices=2, limit_val_batches=0) for _ in range(2))
        for run, epochs in ((first, 1), (first, 2), (other, 1)):
            run.fit_loop.max_epochs = epochs
            run.fit(module, _data(64))
        runs.append(Run(module.losses, other._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]))
    return {"fits": runs}


def test_further_fits_train_as_ddp() -> None:
    ranks = run_distributed(_several_fits, 2)
    assert len(ranks[0]["fits"][1].losses) == 24
    assert departures({"fits": Case()}, ranks, **CLOSE) == []


# -- set-up


class Late(Recommender):
    """Builds its tables on the meta device, in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Net()


def _meta(stage: str) -> dict[str, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    run = trainer(devices=2)
    getattr(run, stage)(Late(), datamodule=_data(32))
    return run.strategy.lightning_module_state_dict()


def test_meta_device() -> None:
    fitted, initial = run_distributed(lambda: [_meta("fit"), _meta("validate")], 2)[0]
    for weights in (fitted, initial):
        assert all(value.isfinite().all() and value.std() > 0.01 for value in weights.values())
    item = initial["net.embeddings.embeddings.item.weight"]
    assert len(item.unique(dim=0)) == ITEMS, "rows would be twice there if every rank drew with the seed of the run"


class Counting(Recommender):
    """Keeps FBGEMM's count of updates during every step, and the environment."""

    def __init__(self) -> None:
        super().__init__("rowwise_adagrad")
        self.counts: list[int] = []

    def on_after_backward(self) -> None:
        modules = self.trainer.strategy.tables.modules
        self.counts += [int(kernel.emb_module.iter) for _, module in modules for kernel in kernels(module)]
        assert "LOCAL_WORLD_SIZE" not in os.environ


def _counts_and_environment() -> Any:
    del os.environ["LOCAL_WORLD_SIZE"]  # torchrun sets it, Lightning's launcher does not
    module = Counting()
    trainer(devices=2, max_epochs=2, strategy=FreeScaleStrategy(overlap="torchrec")).fit(module, _data(32))
    return module.counts, os.environ.get("LOCAL_WORLD_SIZE")


def test_validation_does_not_count_as_an_update_and_the_environment_stays() -> None:
    """FBGEMM counts every forward; Adam's bias correction would be off after validation."""
    assert run_distributed(_counts_and_environment, 2) == [([1, 2, 3, 4, 5, 6, 7, 8], None)] * 2


class WithoutCategories(Recommender):
    """Trains one table of two, with an optimizer of any kind."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for name, p in self.named_parameters() if "cat" not in name], lr=0.1)


def test_tables_that_adam_updates_lazily_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def messages(kind: Any) -> list[str]:
        caplog.clear()
        trainer(devices=2).fit(WithoutCategories(kind), fixed_loader(int(os.environ["RANK"]), 2))
        return [text for text in caplog.messages if "looks up" in text]

    first, second = run_distributed(lambda: [messages(kind) for kind in (torch.optim.AdamW, torch.optim.Adagrad)], 2)
    assert second == [[], []] and first[1] == []
    assert len(first[0]) == 1 and "Adam" in first[0][0] and "['net.embeddings.embeddings.item.weight']" in first[0][0]
