"""A run that stops and resumes is bitwise the run that did not stop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import OPTIMIZERS, REPEATS, Recommender, Samples, StopAt, collate, trainer


class SaveAtEpochEnd(L.pytorch.callbacks.ModelCheckpoint):
    """Lightning's own checkpoint at the end of the first epoch, where training stops."""

    def __init__(self, step: int, path: str) -> None:
        super().__init__(dirpath=Path(path).parent, filename=Path(path).stem, save_on_train_epoch_end=True)

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_epoch_end(trainer, *args)
        trainer.should_stop = True


class Seen(Recommender):
    """Also keeps which samples it saw, and trains with dropout."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.dropout = 0.2
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        assert self.trainer.estimated_stepping_batches  # builds the loader early, before the checkpoint is read
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(optimizer: str, workers: int, stop: L.Callback | None = None, resume: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0 if resume is None else 7)
    module, data = Seen(optimizer), Samples(64)  # 8 steps an epoch
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, num_workers=workers, balance=REPEATS)
    fit = trainer(
        devices=2, max_epochs=3, callbacks=[stop] if stop else [], enable_checkpointing=isinstance(stop, SaveAtEpochEnd)
    )
    fit.fit(module, loader, ckpt_path=resume)
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {"losses": module.losses, "seen": module.seen, "weights": state["state_dict"], "states": state["optimizer_states"]}


@cache
def _run_without_a_stop(optimizer: str, workers: int) -> list[dict[str, Any]]:
    """What three ways to stop are compared with."""
    return run_distributed(_fit, 2, optimizer, workers)


Stopped = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The checkpoint of a run that stops, and what its ranks know; one run for all tests."""

    @cache
    def run(optimizer: str, workers: int, stop: Any, step: int) -> tuple[str, list[dict[str, Any]]]:
        path = str(tmp_path_factory.mktemp("stopped") / "half.ckpt")
        return path, run_distributed(_fit, 2, optimizer, workers, stop=stop(step, path))

    return run


@pytest.mark.parametrize(
    ("stop", "step"),
    [(StopAt, 10), pytest.param(StopAt, 8, marks=pytest.mark.slow), pytest.param(SaveAtEpochEnd, 8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("optimizer", "workers"),
    [
        pytest.param("sgd", 0, marks=pytest.mark.slow),
        ("adagrad", 0),
        pytest.param("adagrad", 2, marks=pytest.mark.slow),
        pytest.param("rowwise_adagrad", 0, marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise(optimizer: str, stop: Any, step: int, workers: int, stopped: Stopped) -> None:
    whole = _run_without_a_stop(optimizer, workers)
    path, first = stopped(optimizer, workers, stop, step)
    second = run_distributed(_fit, 2, optimizer, workers, resume=path)
    for rank in range(2):
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
    assert len(first[0]["losses"]) == step and len(second[0]["losses"]) == 24 - step
    _equal(second[0]["weights"], whole[0]["weights"])
    _equal(second[0]["states"][0]["state"], whole[0]["states"][0]["state"])


class Plain(Seen):
    """Without tables: Lightning then reads the checkpoint before the strategy's set-up."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return self.net(batch["label"][:, None]).mean()


def _fit_plain(path: str, batch_size: int, stop_at: int | None = None) -> dict[str, Any]:
    module, data = Plain("sgd"), Samples(80)
    loader = FreeScaleDataModule(data, data.lengths, batch_size, collate_fn=collate, balance=REPEATS)
    fit = trainer(devices=1, max_epochs=3, callbacks=[StopAt(stop_at, path)] if stop_at else [])
    fit.fit(module, loader, ckpt_path=None if stop_at else path)
    return {"seen": module.seen, "reload": fit.reload_dataloaders_every_n_epochs}


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [25, 38])
def test_larger_steps_after_a_resume_without_tables(stop_at: int, tmp_path: Path) -> None:
    """20 steps an epoch before, 5 after, and the loader is asked for before the Trainer knows its epoch."""
    path = str(tmp_path / "half.ckpt")
    first = run_distributed(_fit_plain, 1, path, 4, stop_at=stop_at)[0]
    second = run_distributed(_fit_plain, 1, path, 16)[0]
    seen = [sample for step in first["seen"] + second["seen"] for sample in step]
    for epoch in range(3):
        assert sorted(seen[80 * epoch : 80 * (epoch + 1)]) == list(range(80))
    assert len(seen) == 240 and second["reload"] == 0


class Breaks(Plain):
    """Fails in its second step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if len(self.seen) == 1:
            raise KeyError("the needle")
        return super().training_step(batch, batch_idx)


def _resume_twice(path: str) -> tuple[list[int], list[int]]:
    _fit_plain(path, 16, stop_at=2)
    data = Samples(80)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, seed=5, balance=REPEATS)
    with pytest.raises(KeyError, match="the needle"):
        trainer(devices=1, max_epochs=2).fit(Breaks("sgd"), loader, ckpt_path=path)
    module = Plain("sgd")
    trainer(devices=1, max_epochs=2).fit(module, loader, ckpt_path=path)
    anew = Plain("sgd")
    trainer(devices=1, max_epochs=1).fit(anew, loader)
    flat = [[sample for step in net.seen for sample in step] for net in (module, anew)]
    return flat[0], [flat[1] == loader.sampler(0, 1)._batches.order(0).tolist(), loader.train.seed]


@pytest.mark.slow
def test_a_failed_fit_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    resumed, (own_order, seed) = run_distributed(_resume_twice, 1, str(tmp_path / "half.ckpt"))[0]
    assert len(resumed) == 48 + 80
    assert sorted(resumed[48:]) == list(range(80))
    assert own_order and seed == 5, "a fit from the start has its own seed again"


def _resume_pooled(path: str, cost: Any, stop_at: int | None = None) -> None:
    data = Samples(80)
    loader = FreeScaleDataModule(data, data.lengths, 4, cost=cost, collate_fn=collate, balance=BalanceOptions(outlier_window=8))
    fit = trainer(devices=1, max_epochs=1, callbacks=[StopAt(stop_at, path)] if stop_at else [])
    fit.fit(Plain("sgd"), loader, ckpt_path=None if stop_at else path)


@pytest.mark.slow
def test_pooled_outliers_resume_with_the_same_costs_only(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run_distributed(_resume_pooled, 1, path, "auto", 5)
    run_distributed(_resume_pooled, 1, path, "auto")
    with pytest.raises(RankFailed, match=r"inside an epoch with costs=.*samples would be lost or repeated"):
        run_distributed(_resume_pooled, 1, path, lambda lengths: lengths)


def _fit_on(world: int, workers: int, path: str, batch_size: int = 4, stop_at: int | None = None) -> dict[str, Any]:
    """70 samples, so that the last step is uneven."""
    torch.manual_seed(0)
    module, data = Seen("sgd"), Samples(70)
    loader = FreeScaleDataModule(data, data.lengths, batch_size, collate_fn=collate, num_workers=workers, balance=REPEATS)
    fit = trainer(devices=world, max_epochs=3, callbacks=[StopAt(stop_at, path)] if stop_at else [])
    fit.fit(module, loader, ckpt_path=None if stop_at else path)
    epochs = [loader.sampler(0, world)._batches.order(epoch).tolist() for epoch in range(3)]
    return {"seen": module.seen, "epochs": epochs, "steps": fit.global_step, "reload": fit.reload_dataloaders_every_n_epochs}


FURTHER = [(3, 2, 2, 0, 4), (2, 1, 12, 0, 4), (2, 3, 12, 2, 4), (2, 2, 4, 0, 3)]


@pytest.mark.parametrize(
    ("then", "now", "stop_at", "workers", "batch_size"),
    [(2, 3, 4, 0, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)],
)
def test_resume_inside_an_epoch_on_other_ranks(
    then: int, now: int, stop_at: int, workers: int, batch_size: int, tmp_path: Path
) -> None:
    """The rest of the epoch in the same order, no sample lost or repeated, and whole epochs after it."""
    path = str(tmp_path / "half.ckpt")
    first = run_distributed(_fit_on, then, then, workers, path, stop_at=stop_at)
    second = run_distributed(_fit_on, now, now, workers, path, batch_size)
    epoch, inside = divmod(stop_at, -(-70 // (4 * then)))
    trained = [_by_step(result) for result in (first, second)]
    assert len(trained[0]) == stop_at
    done = sorted(sample for step in trained[0][stop_at - inside :] for sample in step)
    order, steps = first[0]["epochs"], iter(trained[1])
    assert done == sorted(order[epoch][: inside * 4 * then])
    expected = [order[epoch][inside * 4 * then :], *order[epoch + 1 :]]
    for rest in expected:
        while rest:
            step = next(steps)
            assert now * batch_size == len(step) or len(rest) < now * batch_size + now
            assert sorted(step) == sorted(rest[: len(step)])
            rest = rest[len(step) :]
    assert next(steps, None) is None
    assert second[0]["reload"] == 0, "the Trainer's own setting is put back"


def _by_step(results: list[dict[str, Any]]) -> list[list[int]]:
    """Samples of all ranks, step by step."""
    return [[sample for rank in step for sample in rank] for step in zip(*(result["seen"] for result in results), strict=True)]


def _equal(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for key in a:
        _equal(a[key], b[key]) if isinstance(a[key], dict) else torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_checkpoint_is_that_of_the_plain_module(optimizer: str, stopped: Stopped) -> None:
    """It loads strictly into the unsharded module and its optimizer, and training goes on under "ddp" as under "freescale"."""
    path, first = stopped(optimizer, 0, StopAt, 10)
    checkpoint = torch.load(path, weights_only=True)
    module = Recommender(optimizer)
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    _equal(dict(module.state_dict()), first[0]["weights"])
    module.configure_optimizers().load_state_dict(checkpoint["optimizer_states"][0])
    for mine, ddp in run_distributed(_goes_on, 2, optimizer, path):
        assert len(mine) == 14 and ddp == pytest.approx(mine, rel=1e-5)


def _goes_on(optimizer: str, path: str) -> tuple[list[float], list[float]]:
    """Losses after a resume under "freescale" and under "ddp"."""
    return _fit_without_dropout("freescale", optimizer, path), _fit_without_dropout("ddp", optimizer, path)


def _fit_without_dropout(strategy: str, optimizer: str, resume: str) -> list[float]:
    module, data = Seen(optimizer), Samples(64)
    module.dropout = 0.0
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
    trainer(strategy=strategy, devices=2, max_epochs=3).fit(module, loader, ckpt_path=resume)
    return module.losses


def _test_with_checkpoint(path: str) -> float:
    data = Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, test_dataset=Samples(32), balance=REPEATS)
    return trainer(devices=2).test(Recommender("adagrad"), loader, ckpt_path=path, verbose=False)[0]["test"]


@pytest.mark.slow
def test_mid_epoch_checkpoint_serves_test_with_another_batch_size(stopped: Stopped) -> None:
    path, _ = stopped("adagrad", 0, StopAt, 10)
    module, samples = Recommender("adagrad"), Samples(32)
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    batch = collate([samples[index] for index in range(32)])
    expected = torch.nn.functional.mse_loss(module.net(batch["features"]), batch["label"]).item()
    for loss in run_distributed(_test_with_checkpoint, 2, path):
        assert loss == pytest.approx(expected, rel=1e-5)


def _fit_then_test(path: str) -> None:
    module, data = Seen("adagrad"), Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, test_dataset=Samples(16), balance=REPEATS)
    fit = trainer(devices=2)
    fit.fit(module, loader)
    fit.save_checkpoint(f"{path}.fit")
    fit.test(module, loader, verbose=False)
    fit.save_checkpoint(f"{path}.test")


@pytest.mark.slow
def test_checkpoint_after_test_keeps_the_optimizer_states(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    run_distributed(_fit_then_test, 2, path)
    fit, test = (torch.load(f"{path}.{stage}", weights_only=True)["optimizer_states"][0] for stage in ("fit", "test"))
    assert fit["param_groups"] == test["param_groups"]
    _equal(test["state"], fit["state"])


class Shared(Recommender):
    """Holds its net, and so its tables, under a second name."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.tower = self.net


def _fit_shared(path: str) -> None:
    data, fit = Samples(32), trainer(devices=2)
    fit.fit(Shared(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS))
    fit.save_checkpoint(path)
    again = trainer(devices=2, max_epochs=2)
    again.fit(Shared(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS), ckpt_path=path)


@pytest.mark.slow
def test_tables_with_two_names(tmp_path: Path) -> None:
    path = str(tmp_path / "shared.ckpt")
    run_distributed(_fit_shared, 2, path)
    state = torch.load(path, weights_only=True)["state_dict"]
    Shared().load_state_dict(state, strict=True)
    name = "embeddings.embeddings.item.weight"
    assert torch.equal(state[f"net.{name}"], state[f"tower.{name}"])


def _resume_other_world(path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, data = Seen("adagrad"), Samples(64)
        trainer(devices=3, max_epochs=2).fit(
            module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS), ckpt_path=path
        )
    return [str(w.message) for w in caught if "random states" in str(w.message)]


def test_epoch_end_checkpoint_resumes_on_another_world_size(stopped: Stopped) -> None:
    path, _ = stopped("adagrad", 0, SaveAtEpochEnd, 8)
    warned = run_distributed(_resume_other_world, 3, path)[0]
    assert len(warned) == 1
    assert "2 ranks, this run has 3" in warned[0]


class Grows(L.Callback):
    """Adds a parameter group while training, as Lightning's finetuning callbacks do."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def _fit_growing() -> list[int]:
    data, fit = Samples(32), trainer(devices=2, callbacks=[Grows()])
    fit.fit(Recommender("adagrad"), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS))
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)["optimizer_states"][0]
    return [len(group["params"]) for group in state["param_groups"]]


def test_parameter_groups_added_later_are_saved() -> None:
    assert run_distributed(_fit_growing, 2)[0] == [4, 1]


def _save_half(strategy: str, optimizer: str, path: str) -> None:
    module, data = Seen(optimizer), Samples(64)
    module.dropout = 0.0
    fit = trainer(strategy=strategy, devices=2, max_epochs=3, callbacks=[StopAt(10, path)])
    fit.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoint_of_ddp_resumes_sharded(optimizer: str, tmp_path: Path) -> None:
    path = str(tmp_path / "ddp.ckpt")
    run_distributed(_save_half, 2, "ddp", optimizer, path)
    for mine, ddp in run_distributed(_goes_on, 2, optimizer, path):
        assert len(mine) == 14 and mine == pytest.approx(ddp, rel=1e-5)
