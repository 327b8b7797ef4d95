"""What FreeScaleDataModule is given: each bad argument is refused when it is made, by an error that names it, value and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalanceOptions, StreamOptions
from tests.helpers.recommender import REPEATS, Samples, collate

DATA = Samples(8)
LENGTHS = {"lengths": DATA.lengths}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict, r"lengths=None.*pass lengths="),
        (lambda: {"lengths": [1, 2]}, r"lengths has shape \(2,\): pass one number per sample, shape \[8\]"),
        (lambda: {"lengths": [1, 2, 3, 4, 5, 6, 7, -8]}, r"lengths\[7\] is -8.0"),
        (lambda: {"lengths": [1, 2, 3, float("nan"), 5, 6, 7, 8]}, r"lengths\[3\] is nan"),
        (lambda: {"cost": [1.0] * 7}, r"cost has shape \(7,\)"),
        (lambda: {**LENGTHS, "cost": lambda lengths: -lengths}, r"cost\(lengths\)\[0\] is -"),
        (lambda: {**LENGTHS, "target_counts": [1.0] * 8}, r"target_counts= is for loss_reduction='target_mean'"),
        (lambda: {"lengths": [1.0], "cost": [1.0] * 8}, r"lengths has shape \(1,\)"),
        (lambda: {"cost": lambda sample: float("inf")}, r"cost\(sample\)\[0\] is inf"),
        (lambda: {**LENGTHS, "batch_size": 0}, r"batch_size=0.*at least 1"),
        (lambda: {**LENGTHS, "loss_reduction": "mean"}, r"loss_reduction='mean'.*'target_mean'"),
        (lambda: {"cost": [1.0] * 8, "loss_reduction": "target_mean"}, r"'target_mean' needs target_counts="),
        (lambda: {"cost": [1.0] * 8, "balance": BalanceOptions(calibrate=True)}, r"calibrate=True.*pass lengths="),
        (
            lambda: {**LENGTHS, "balance": {"assignment_mode": "slack"}},
            r"balance=\{.*pass True, False or BalanceOptions",
        ),
        (
            lambda: {**LENGTHS, "balance": BalanceOptions(calibrate="auto")},
            r"BalanceOptions\(calibrate='auto'\): pass True, False, or None",
        ),
        (lambda: {**LENGTHS, "balance": BalanceOptions(window=1)}, r"BalanceOptions\(window=1\): pass True, False or 'auto'"),
        (
            lambda: {**LENGTHS, "balance": BalanceOptions(slow_ranks="rebalance")},
            r"slow_ranks='rebalance'.*needs calibrate=True",
        ),
        (lambda: {**LENGTHS, "stream": StreamOptions()}, r"stream=...\) has no meaning for a map-style data set"),
        (
            lambda: {**LENGTHS, "balance": BalanceOptions(count_slack=0.9)},
            r"count_slack=...\) has no meaning for assignment_mode='fixed'",
        ),
        (lambda: {"unique_ids": [1] * 8, **LENGTHS, "balance": REPEATS}, r"unique_ids=...\) has no meaning for costs"),
        (lambda: {**LENGTHS, "balance": BalanceOptions(slow_ranks="ignore")}, r"slow_ranks='ignore'.*'rebalance'"),
        (lambda: {**LENGTHS, "balance": BalanceOptions(tokens=[1.0])}, r"tokens has shape \(1,\)"),
        (lambda: {"cost": len, "unique_ids": [1] * 8}, r"unique_ids= goes with lengths="),
        (lambda: {**LENGTHS, "cost": CostModel(unique=1.0), "unique_ids": [1] * 7}, r"unique_ids has shape \(7,\)"),
        (lambda: {**LENGTHS, "cost": CostModel(unique=1.0)}, r"unique=1.0.*pass unique="),
        (lambda: {**LENGTHS, "batch_sampler": [[0]]}, r"batch_sampler=...\) is not yours to set"),
        (lambda: {**LENGTHS, "generator": torch.Generator()}, r"generator=...\) is not yours to set"),
    ],
)
def test_data_module_arguments(arguments: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeScaleDataModule(DATA, **arguments())


def test_an_argument_that_neither_the_data_module_nor_torchs_loader_has() -> None:
    with pytest.raises(TypeError, match=r"FreeScaleDataModule\(num_worker=...\): there is no such argument"):
        FreeScaleDataModule(DATA, DATA.lengths, num_worker=2)


def test_options_of_torchs_loader_reach_every_loader() -> None:
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "multiprocessing_context": "fork"}
    data = FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate, val_dataset=DATA, **options)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        assert sorted(i for batch in loader for i in batch["index"].tolist()) == list(range(8))


class Empty(Dataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> None:
        raise IndexError(index)


def test_empty_dataset() -> None:
    with pytest.raises(ValueError, match=r"train_dataset=Empty is empty"):
        FreeScaleDataModule(Empty(), lengths=[])


def test_iterable_dataset() -> None:
    with pytest.raises(ValueError, match="not map-style"):
        FreeScaleDataModule(iter([1]), lengths=[1])
