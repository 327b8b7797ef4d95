"""fit, validate, test and predict under FreeScaleStrategy, compared with "ddp", for modules of all kinds."""

from __future__ import annotations

import logging
import os
import warnings
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
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import REPEATS, Net, Recommender, Samples, collate, fixed_loader, tables, trainer


def _data(samples: int = 37, **options: Any) -> FreeScaleDataModule:
    data = Samples(samples)
    stages = {stage: Samples(samples, seed=1) for stage in ("val_dataset", "test_dataset", "predict_dataset")}
    return FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, **stages, **{"balance": REPEATS, **options})


class Keeps(Recommender):
    """Keeps the samples it trains on."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen += batch["index"].tolist()
        return super().training_step(batch, batch_idx)


def _all_stages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("freescale", "ddp"):
        torch.manual_seed(0)
        found[strategy] = torch.cat(trainer(strategy=strategy, devices=2).predict(Recommender(), _data()))
    torch.manual_seed(0)
    module, fit = Keeps(), trainer(devices=2, max_epochs=2)
    fit.fit(module, _data())
    assert isinstance(module.net.embeddings, ShardedModule)
    found["validated"] = fit.validate(module, _data(), verbose=False)[0]["val"]
    found["tested"] = fit.test(module, _data(), verbose=False)[0]["test"]
    return found | {"predicted": fit.predict(module, _data()), "seen": module.seen}


def test_prediction_before_a_fit_and_all_stages_after_it() -> None:
    """Validation sees what training left; every sample once, uneven last batch or not."""
    ranks = run_distributed(_all_stages, 2)
    for found in ranks:
        assert_same(found["freescale"], found["ddp"])
        assert found["validated"] == ranks[0]["validated"] == pytest.approx(found["tested"])
    assert sorted(index for found in ranks for index in found["seen"]) == sorted([*range(37)] * 2)
    assert sum(len(batch) for found in ranks for batch in found["predicted"]) == 37


# -- the same numbers as "ddp"


class Groups(Recommender):
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


class Alone(Recommender):
    """All parameters sit in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.net = EmbeddingCollection(tables=tables())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.net(batch["features"])["history"].values().pow(2).mean()
        self.losses.append(loss.item())
        return loss


class OneRow(Recommender):
    """Its table has one row, so row-wise sharding would leave a rank without; and it is called by keyword."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.net = EmbeddingCollection(
            tables=[EmbeddingConfig(name="one", num_embeddings=1, embedding_dim=8, feature_names=["history"])]
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        lengths = batch["features"]["history"].lengths()
        values = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        features = KeyedJaggedTensor(keys=["history"], values=values, lengths=lengths)
        loss = self.net(features=features)["history"].values().pow(2).mean()
        self.losses.append(loss.item())
        return loss


class InModel(Recommender):
    """Its collection sits in one of TorchRec's own models."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        configs = [EmbeddingBagConfig(name="bag", num_embeddings=50, embedding_dim=8, feature_names=["history"])]
        self.sparse = SparseArch(EmbeddingBagCollection(tables=configs))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.sparse(batch["features"]).pow(2).mean()
        self.losses.append(loss.item())
        return loss


class OwnCollection(EmbeddingCollection):
    """A collection that TorchRec does not know how to shard."""


class OwnKind(Recommender):
    def __init__(self) -> None:
        super().__init__("adagrad")
        self.net.embeddings = OwnCollection(tables=tables())


class Dense(L.LightningModule):
    """No embedding collection at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses = nn.Linear(1, 1), []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch["label"][:, None]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


CLOSE, SAME = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 0.0, "atol": 0.0}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, float]]] = {
    "groups": (Groups, {}, CLOSE),
    "no dense parameters": (Alone, {}, CLOSE),
    "fewer rows than ranks": (OneRow, {}, CLOSE),
    "in a model of TorchRec": (InModel, {"max_steps": 3}, CLOSE),
    "another collection": (OwnKind, {}, SAME),
    "no collection": (Dense, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, SAME),
    "a second fit": (lambda: Recommender("adagrad"), {"fits": 2}, CLOSE),
    "a second fit of the same Trainer": (lambda: Recommender("adagrad"), {"fits": 2, "again": True}, CLOSE),
}


def _fit(strategy: str, make: Callable[[], Any], fits: int = 1, again: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    module, run = make(), None
    for _ in range(fits):
        if run is None or not again:
            run = trainer(strategy=strategy, devices=2, limit_val_batches=0, **options)
        else:
            run.fit_loop.max_epochs = 2
        run.fit(module, _data(64))
    return module.losses, run._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


def _all_cases() -> Any:
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, (make, options, _) in CASES.items():
            ddp = "ddp_find_unused_parameters_true"
            found[name] = _fit("freescale", make, **options), _fit(ddp, make, **options)
    return found, [str(each.message) for each in caught if "cannot be sharded" in str(each.message)]


def test_trains_as_ddp() -> None:
    for rank, (found, warned) in enumerate(run_distributed(_all_cases, 2)):
        for name, ((losses, weights), (expected, expected_weights)) in found.items():
            tolerance = CASES[name][2]
            assert losses == pytest.approx(expected, rel=tolerance["rtol"], abs=0), name
            assert len(set(losses)) > 1, f"{name}: the loss must move, or equality means nothing"
            if rank == 0:
                for key, weight in weights.items():
                    torch.testing.assert_close(weight, expected_weights[key], **tolerance, msg=f"{name}: {key}")
        assert len(warned) == (rank == 0) and all("'net.embeddings'" in text for text in warned)


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


class LateEven(Late):
    """Has one table, which two ranks share evenly."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = EmbeddingCollection(tables=tables()[:1], device=torch.device("meta"))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass


def _meta(module: Late, stage: str) -> dict[str, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    run = trainer(devices=2)
    getattr(run, stage)(module, datamodule=_data(32))
    return run.strategy.lightning_module_state_dict()


def test_meta_device() -> None:
    fitted, even = run_distributed(lambda: [_meta(Late(), "fit"), _meta(LateEven(), "validate")], 2)[0]
    for weights in (fitted, even):
        assert all(value.isfinite().all() and value.std() > 0.01 for value in weights.values())
    item = even["net.embeddings.item.weight"]
    assert not torch.equal(item[:25], item[25:]), "they would be if every rank drew with the seed of the run"


class Counting(Recommender):
    """Keeps FBGEMM's count of updates during every step, and the environment."""

    def __init__(self) -> None:
        super().__init__("rowwise_adagrad")
        self.counts: list[int] = []

    def on_after_backward(self) -> None:
        modules = self.trainer.strategy.tables.modules
        self.counts += [int(kernel.emb_module.iter) for _, module in modules for kernel in kernels(module)]


def _counts_and_environment() -> Any:
    del os.environ["LOCAL_WORLD_SIZE"]  # torchrun sets it, Lightning's launcher does not
    module = Counting()
    trainer(devices=2, max_epochs=2, strategy=FreeScaleStrategy(overlap=False)).fit(module, _data(32))
    return module.counts, os.environ.get("LOCAL_WORLD_SIZE")


def test_validation_does_not_count_as_an_update_and_the_environment_stays() -> None:
    """FBGEMM counts every forward; Adam's bias correction would be off after validation."""
    assert run_distributed(_counts_and_environment, 2) == [([1, 2, 3, 4, 5, 6, 7, 8], None)] * 2


class AdamFor(Recommender):
    """One table is trained, with Adam or Adagrad, the other one is frozen."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind([p for name, p in self.named_parameters() if "cat" not in name], lr=0.1)


def test_tables_that_adam_updates_lazily_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def messages(kind: Any) -> list[str]:
        caplog.clear()
        trainer(devices=2).fit(AdamFor(kind), fixed_loader(int(os.environ["RANK"]), 2))
        return [text for text in caplog.messages if "looks up" in text]

    first, second = run_distributed(lambda: [messages(kind) for kind in (torch.optim.AdamW, torch.optim.Adagrad)], 2)
    assert second == [[], []] and first[1] == []
    assert len(first[0]) == 1 and "Adam" in first[0][0] and "['net.embeddings.embeddings.item.weight']" in first[0][0]
