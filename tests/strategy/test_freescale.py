"""fit, validate, test, predict, and several of them in one process."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardedModule
from torchrec.models.dlrm import SparseArch
from torchrec.modules.embedding_configs import PoolingType

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.embeddings.shards import kernels
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import REPEATS, Net, Recommender, Samples, collate, tables, trainer


def _data(samples: int = 37, **options: Any) -> FreeScaleDataModule:
    data = Samples(samples)
    stages = {stage: Samples(samples, seed=1) for stage in ("val_dataset", "test_dataset", "predict_dataset")}
    return FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, **stages, **{"balance": REPEATS, **options})


def _all_stages() -> dict[str, Any]:
    torch.manual_seed(0)
    module, fit = Recommender("adagrad"), trainer(devices=2, max_epochs=2)
    fit.fit(module, _data())
    assert isinstance(module.net.embeddings, ShardedModule)
    validated = fit.validate(module, _data(), verbose=False)[0]["val"]
    tested = fit.test(module, _data(), verbose=False)[0]["test"]
    return {"validated": validated, "tested": tested, "predicted": fit.predict(module, _data())}


@pytest.mark.slow
def test_stages_after_fit() -> None:
    """Validation sees what training left; every sample once, uneven last batch or not."""
    results = run_distributed(_all_stages, 2)
    assert results[0]["validated"] == results[1]["validated"] == pytest.approx(results[0]["tested"])
    assert sum(len(batch) for rank in results for batch in rank["predicted"]) == 37


def _predict_alone(strategy: str, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat(trainer(strategy=strategy, devices=world).predict(Recommender(), _data()))


def test_predict_without_fit_is_sharded_and_equals_ddp() -> None:
    mine, ddp = (run_distributed(_predict_alone, 2, strategy, 2) for strategy in ("freescale", "ddp"))
    for rank in range(2):
        torch.testing.assert_close(mine[rank], ddp[rank], rtol=0, atol=0)


def _fit_twice(fresh_trainer: bool, strategy: str) -> list[float]:
    torch.manual_seed(0)
    module, options = Recommender("adagrad"), {"devices": 2, "strategy": strategy}
    fit = trainer(**options)
    fit.fit(module, _data(32))
    if fresh_trainer:
        fit = trainer(**options)
    else:
        fit.fit_loop.max_epochs = 2
    fit.fit(module, _data(32))
    return module.losses


@pytest.mark.parametrize("fresh_trainer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_fits_in_one_process(fresh_trainer: bool) -> None:
    """The second fit starts from the first one's weights with a new optimizer, as under "ddp"."""
    mine, ddp = (run_distributed(_fit_twice, 2, fresh_trainer, strategy) for strategy in ("freescale", "ddp"))
    assert len(mine[0]) == 8
    assert mine[0] == pytest.approx(ddp[0], rel=1e-5)


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


def _meta(module_class: type[Late], stage: str) -> dict[str, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    run, module = trainer(devices=2), module_class()
    getattr(run, stage)(module, datamodule=_data(32))
    return run.strategy.lightning_module_state_dict()


def test_meta_device() -> None:
    state = run_distributed(_meta, 2, Late, "fit")[0]
    assert all(value.isfinite().all() and value.std() > 0.01 for value in state.values())


def test_shards_on_the_meta_device_are_no_copies_of_each_other() -> None:
    """They would be if every rank drew with the seed of the run."""
    item = run_distributed(_meta, 2, LateEven, "validate")[0]["net.embeddings.item.weight"]
    assert item.std() > 0.01
    assert not torch.equal(item[:25], item[25:])


class Bags(Recommender):
    """An EmbeddingBagCollection beside the EmbeddingCollection."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        configs = [EmbeddingBagConfig(name="bag", num_embeddings=50, embedding_dim=8, feature_names=["history"])]
        configs[0].pooling = PoolingType.MEAN
        self.bags, self.out = EmbeddingBagCollection(tables=configs), torch.nn.Linear(8, 1, bias=False)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        features = batch["features"]
        pooled = self.out(self.bags(features)["history"]).squeeze(1)
        loss = torch.nn.functional.mse_loss(self.net(features) + pooled, batch["label"])
        self.losses.append(loss.item())
        return loss


def _fit_bags(strategy: str, optimizer: str) -> list[float]:
    torch.manual_seed(0)
    module = Bags(optimizer)
    trainer(strategy=strategy, devices=2).fit(module, _data(64))
    return module.losses


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adagrad"])
def test_several_collections(optimizer: str) -> None:
    mine, ddp = (run_distributed(_fit_bags, 2, strategy, optimizer) for strategy in ("freescale", "ddp"))
    assert mine[0] == pytest.approx(ddp[0], rel=1e-5)


class Groups(Recommender):
    """Tables in parameter groups of their own with learning-rate schedules of their own, one of them frozen."""

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


def _fit_groups(strategy: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module, fit = Groups(), trainer(strategy=strategy, devices=2)
    fit.fit(module, _data(64))
    return module.losses, fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


def test_schedules_reach_every_table() -> None:
    (mine, weights), (ddp, expected) = (run_distributed(_fit_groups, 2, s)[0] for s in ("freescale", "ddp"))
    assert mine == pytest.approx(ddp, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


class Alone(Recommender):
    """All parameters sit in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.net = EmbeddingCollection(tables=tables())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.net(batch["features"])["history"].values().pow(2).mean()
        self.losses.append(loss.item())
        return loss


def _fit_alone() -> list[float]:
    module = Alone()
    trainer(devices=2, limit_val_batches=0).fit(module, _data(64))
    return module.losses


def test_without_dense_parameters() -> None:
    losses = run_distributed(_fit_alone, 2)[0]
    assert losses[-1] != losses[0]


class Dense(L.LightningModule):
    """No embedding collection at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.layer(batch["label"][:, None]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def _fit_dense(strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module, fit = Dense(), trainer(strategy=strategy, devices=2, accumulate_grad_batches=2, gradient_clip_val=1.0)
    fit.fit(module, _data(64))
    return {name: value.detach() for name, value in module.state_dict().items()}


def test_module_without_collection_trains_as_ddp() -> None:
    mine, ddp = (run_distributed(_fit_dense, 2, strategy)[0] for strategy in ("freescale", "ddp"))
    for name, value in ddp.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=0)


class PartlyUnused(Recommender):
    """Has parameters that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


def _fit_partly_unused(strategy: str) -> list[float]:
    torch.manual_seed(0)
    module = PartlyUnused()
    trainer(strategy=strategy, devices=2, max_epochs=1).fit(module, _data(32))
    return module.losses


def test_unused_parameters_are_found_where_it_is_asked_for() -> None:
    losses = run_distributed(_fit_partly_unused, 2, "freescale_find_unused_parameters_true")[0]
    assert len(losses) == 4
    told = r"'freescale_find_unused_parameters_true'.*FreeScaleStrategy\(find_unused_parameters=True"
    with pytest.raises(RankFailed, match=told):
        run_distributed(_fit_partly_unused, 2, "freescale")


def _environment_after_a_fit() -> str | None:
    del os.environ["LOCAL_WORLD_SIZE"]  # torchrun sets it, Lightning's launcher does not
    trainer(devices=2, max_epochs=1).fit(Recommender(), _data())
    return os.environ.get("LOCAL_WORLD_SIZE")


def test_the_next_trainer_finds_the_environment_as_it_was() -> None:
    assert run_distributed(_environment_after_a_fit, 2) == [None, None]


class Counting(Recommender):
    """Keeps FBGEMM's count of updates during every step."""

    def __init__(self) -> None:
        super().__init__("rowwise_adagrad")
        self.counts: list[int] = []

    def on_after_backward(self) -> None:
        modules = self.trainer.strategy.tables.modules
        self.counts += [int(kernel.emb_module.iter) for _, module in modules for kernel in kernels(module)]


def _update_counts() -> list[int]:
    module = Counting()
    trainer(devices=2, max_epochs=2, strategy=FreeScaleStrategy(overlap=False)).fit(module, _data(32))
    return module.counts


def test_validation_does_not_count_as_an_update() -> None:
    """FBGEMM counts every forward; Adam's bias correction would be off after validation."""
    assert run_distributed(_update_counts, 2)[0] == [1, 2, 3, 4, 5, 6, 7, 8]


class OwnKind(EmbeddingCollection):
    """A collection that TorchRec does not know how to shard."""


def _fit_own_kind(strategy: str) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    module = Recommender("adagrad")
    module.net.embeddings = OwnKind(tables=tables())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy=strategy, devices=2).fit(module, _data(64))
    return module.losses, [str(w.message) for w in caught if "cannot be sharded" in str(w.message)]


def test_unknown_collection_is_replicated_with_one_warning() -> None:
    (mine, warned), (ddp, _) = (run_distributed(_fit_own_kind, 2, strategy)[0] for strategy in ("freescale", "ddp"))
    assert mine == ddp
    assert len(warned) == 1
    assert "'net.embeddings'" in warned[0]


class OneRow(Recommender):
    """Its table has one row, so row-wise sharding would leave a rank without; and it is called by keyword."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        config = EmbeddingConfig(name="one", num_embeddings=1, embedding_dim=8, feature_names=["history"])
        self.net = EmbeddingCollection(tables=[config])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        lengths = batch["features"]["history"].lengths()
        values = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        features = KeyedJaggedTensor(keys=["history"], values=values, lengths=lengths)
        loss = self.net(features=features)["history"].values().pow(2).mean()
        self.losses.append(loss.item())
        return loss


def _fit_one_row(strategy: str) -> list[float]:
    torch.manual_seed(0)
    module = OneRow()
    trainer(strategy=strategy, devices=2, limit_val_batches=0).fit(module, _data(64))
    return module.losses


def test_table_with_fewer_rows_than_ranks() -> None:
    mine, ddp = (run_distributed(_fit_one_row, 2, strategy)[0] for strategy in ("freescale", "ddp"))
    assert mine == pytest.approx(ddp, rel=1e-5)


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


def _fit_in_model(strategy: str) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    module = InModel()
    trainer(strategy=strategy, devices=2, limit_val_batches=0, max_steps=3).fit(module, _data(64))
    return module.losses, isinstance(module.sparse.embedding_bag_collection, ShardedModule)


def test_collection_in_a_torchrec_model_is_sharded() -> None:
    options = ("freescale", "ddp_find_unused_parameters_true")
    (mine, sharded), (ddp, _) = (run_distributed(_fit_in_model, 2, strategy)[0] for strategy in options)
    assert sharded
    assert mine == pytest.approx(ddp, rel=1e-5)
