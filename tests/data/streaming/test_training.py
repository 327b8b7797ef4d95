"""Streams under the Trainer: every sample once, the gradient of the global batch, exact resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions, StreamOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.test_resume import Seen, StopAt
from tests.helpers.recommender import Recommender, Samples, collate, trainer

BALANCING = ["local", "global"]


class Stream(IterableDataset):
    """This rank's part of the samples, from where it was left."""

    def __init__(self, size: int = 50) -> None:
        self.samples, self.place, self.fresh = Samples(size), 0, True

    def __iter__(self) -> Any:
        self.place, self.fresh = (0 if self.fresh else self.place), True
        mine = range(int(os.environ["RANK"]), len(self.samples), int(os.environ["WORLD_SIZE"]))
        while self.place < len(mine):
            self.place += 1
            yield self.samples[mine[self.place - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.fresh = state["place"], False


def _length(sample: dict[str, Any]) -> int:
    return len(sample["history"])


STREAM_OPTIONS = {
    "local": StreamOptions(stream_balancing="local", pool_batches=2, max_pool_age=8),
    "global": StreamOptions(stream_balancing="global"),
}


def _data(balancing: str, **options: Any) -> FreeScaleDataModule:
    return FreeScaleDataModule(Stream(), _length, 4, collate_fn=collate, stream=STREAM_OPTIONS[balancing], **options)


def _fit(balancing: str, path: str | None = None, stop_at: int | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0 if stop_at or path is None else 7)
    module = Seen("sgd")
    stop: list[L.Callback] = [StopAt(stop_at, str(path))] if stop_at else []
    fit = trainer(devices=2, max_epochs=2, callbacks=stop)
    fit.fit(module, _data(balancing, **options), ckpt_path=None if stop_at else path)
    weights = fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return {"seen": module.seen, "losses": module.losses, "weights": weights}


@pytest.mark.parametrize("balancing", BALANCING)
def test_every_sample_once_per_epoch(balancing: str) -> None:
    ranks = _run_without_a_stop(balancing, 0)
    steps = len(ranks[0]["seen"])
    assert steps == len(ranks[1]["seen"])
    for first in (0, steps // 2):
        epoch = [i for rank in ranks for step in rank["seen"][first : first + steps // 2] for i in step]
        assert sorted(epoch) == list(range(50))
    moved = {i for step in ranks[0]["seen"] for i in step if i % 2}
    assert bool(moved) == (balancing == "global")


@cache
def _run_without_a_stop(balancing: str, workers: int) -> list[dict[str, Any]]:
    return run_distributed(_fit, 2, balancing, num_workers=workers)


@pytest.mark.parametrize(
    ("balancing", "workers"),
    [pytest.param("local", 0, marks=pytest.mark.slow), ("global", 0), pytest.param("global", 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("stop_at", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_resume_is_bitwise(balancing: str, workers: int, stop_at: int, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = _run_without_a_stop(balancing, workers)
    first = run_distributed(_fit, 2, balancing, path, stop_at, num_workers=workers)
    second = run_distributed(_fit, 2, balancing, path, num_workers=workers)
    for rank in range(2):
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(second[0]["weights"][name], weight, rtol=0, atol=0)
    if stop_at == 4:
        with pytest.raises(RankFailed, match=r"epoch of 2 streams, this run has 1 ranks"):
            run_distributed(_fit_on_one, 1, balancing, path)


def _validate_then_save(path: str) -> None:
    fit = trainer(devices=2, max_epochs=1)
    module, data = Recommender(), _data("global", val_dataset=Samples(8))
    fit.fit(module, data)
    fit.validate(module, data, verbose=False)
    fit.save_checkpoint(path)


def _fit_planned(path: str) -> None:
    samples = Samples(50)
    data = FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate)
    trainer(devices=2, max_epochs=2).fit(Recommender(), data, ckpt_path=path)


@pytest.mark.slow
def test_a_checkpoint_made_after_validation_and_of_another_kind_of_data(tmp_path: Path) -> None:
    path = str(tmp_path / "after.ckpt")
    run_distributed(_validate_then_save, 2, path)
    assert torch.load(path, weights_only=True)["FreeScaleDataModule"]["streams"][0]["batches"] == 0
    with pytest.raises(RankFailed, match=r"made with an IterableDataset, this run has a map-style data set"):
        run_distributed(_fit_planned, 2, path)


def _fit_on_one(balancing: str, path: str) -> None:
    trainer(devices=1).fit(Recommender(), _data(balancing), ckpt_path=path)


def _one_step(devices: int, batch_size: int, balance: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    data = FreeScaleDataModule(Stream(16), _length, batch_size, collate_fn=collate, balance=balance)
    fit = trainer(devices=devices, max_steps=1)
    fit.fit(Recommender("sgd"), data)
    return fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


def test_global_balancing_keeps_the_gradient() -> None:
    """Against one rank that computes the whole global batch alone, and against the ranks' batches as read."""
    balanced = run_distributed(_one_step, 2, 2, 8)[0]
    for other in (run_distributed(_one_step, 1, 1, 16)[0], run_distributed(_one_step, 2, 2, 8, False)[0]):
        for name, weight in balanced.items():
            torch.testing.assert_close(weight, other[name], rtol=1e-6, atol=1e-7)


LOCAL = StreamOptions(stream_balancing="local")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"lengths": [1.0]}, r"lengths=list\).*pass a function"),
        (lambda: {"lengths": None}, r"cannot balance a stream: pass lengths="),
        (lambda: {"cost": [1.0]}, r"cost=list\).*pass a function"),
        (lambda: {"balance": BalanceOptions(calibrate=True)}, r"calibrate=\.\.\.\) has no meaning for an IterableDataset"),
        (lambda: {"balance": BalanceOptions(outlier_window=4)}, r"outlier_window=\.\.\.\) has no meaning"),
        (lambda: {"balance": BalanceOptions(tokens=[1.0])}, r"tokens=\.\.\.\) has no meaning"),
        (lambda: {"seed": 1}, r"seed=\.\.\.\) has no meaning"),
        (lambda: {"shuffle": False}, r"shuffle=\.\.\.\) has no meaning"),
        (lambda: {"pin_memory": True}, r"pin_memory=\.\.\.\) has no meaning for an IterableDataset.* num_workers="),
        (
            lambda: {"stream": LOCAL, "balance": BalanceOptions(assignment_mode="slack")},
            r"assignment_mode=\.\.\.\) has no meaning for stream_balancing='local'",
        ),
        (lambda: {"stream": StreamOptions(stream_balancing="all")}, r"stream_balancing='all'"),
        (
            lambda: {"stream": StreamOptions(stream_balancing="local", max_pool_age=1)},
            r"max_pool_age=1 cannot be kept with pool_batches=8",
        ),
        (
            lambda: {"balance": BalanceOptions(count_slack=0.5)},
            r"count_slack=\.\.\.\) has no meaning for assignment_mode='fixed'",
        ),
        (lambda: {"stream": StreamOptions(pool_batches=3)}, r"pool_batches=\.\.\.\) has no meaning for streams without a pool"),
        (
            lambda: {"balance": False, "stream": StreamOptions(stream_balancing="local", pool_batches=3)},
            r"pool_batches=\.\.\.\) has no meaning for balance=False",
        ),
        (lambda: {"stream": "global"}, r"stream='global'\): pass StreamOptions"),
        (
            lambda: {"loss_reduction": "target_mean", "target_counts": [1.0]},
            r"for a stream pass target_counts= or lengths=, a function",
        ),
        (lambda: {"balance": BalanceOptions(assignment_mode="best")}, r"mode='best'"),
    ],
)
def test_arguments(options: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeScaleDataModule(Stream(), **{"lengths": _length, **options()})
