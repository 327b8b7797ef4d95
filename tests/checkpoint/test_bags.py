"""What is decided of bags, in a run that resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS
from lightning_freescale.strategy import setting_trial
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, BagSamples, Batch, OnlyBags, collate_bags, configs
from tests.helpers.recommender import REPEATS, trainer

LEFT = DECIDING_STEPS + 1
"""The first step of TorchRec's."""


def fit(module: OnlyBags, size: int, micro_batches: Any = 1, resume: str | None = None, **options: Any) -> L.Trainer:
    """Fit on the ranks of ``run_distributed``, 4 samples of each in a step."""
    torch.manual_seed(0)
    samples = BagSamples(size)
    loader = FreeScaleDataModule(
        samples, samples.lengths, 4, collate_fn=collate_bags, micro_batches=micro_batches, balance=REPEATS
    )
    fitting = trainer(devices=int(os.environ["WORLD_SIZE"]), enable_checkpointing="callbacks" in options, **options)
    fitting.fit(module, loader, ckpt_path=resume)
    return fitting


def saving(folder: str, every: int = 1) -> dict[str, Any]:
    """Options of a Trainer that keeps the checkpoint of every step."""
    kept = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    return {"callbacks": [kept]}


def steps_left(module: OnlyBags) -> list[int]:
    return [step for step, left in module.left.items() if left]


# -- micro-batches in the run that resumes


def _divided(folder: str) -> list[Any]:
    """Of a run without micro-batches, and of those that go on with some: losses, the steps of TorchRec's, the last weights."""
    data, ends = 8 * 11 + 2, {"max_epochs": 3}  # 12 steps an epoch; the last has one sample on every rank
    whole = OnlyBags()
    runs = [(whole, fit(whole, data, **ends, **saving(folder)))]
    for micro_batches, step in (("auto", 12), (4, 11)):
        module = OnlyBags()
        runs.append((module, fit(module, data, micro_batches, f"{folder}/step={step}.ckpt", **ends)))
    return [
        (steps_left(module), ran.strategy.overlap_report.steps, ran._checkpoint_connector.dump_checkpoint()["state_dict"])
        for module, ran in runs
    ]


def test_bags_that_were_left_are_overlapped_in_micro_batches(tmp_path: Path) -> None:
    """TorchRec cannot add up the gradients of micro-batches, not of the first step with one part either."""
    for rank, ((whole, _, weights), *divided) in enumerate(run_distributed(_divided, 2, str(tmp_path))):
        assert whole == list(range(LEFT, 36))
        for (left, steps, resumed), expected in zip(divided, (24, 25)):
            assert left == [] and steps == expected
            if rank == 0:
                torch.testing.assert_close(resumed, weights, rtol=1e-4, atol=1e-5)


def _auto(folder: str) -> list[Any]:
    setting_trial.MEASURED, setting_trial.WORTH_IT = 3, 2.0  # so that it is soon decided, for one
    data, ends = 8 * 50, {"max_steps": 46}
    whole, rest = OnlyBags(), OnlyBags()
    first = fit(whole, data, "auto", **ends, **saving(folder, 32))
    chosen = first.datamodule.train.micro_batches.chosen
    fit(rest, data, "auto", f"{folder}/step=32.ckpt", **ends)
    return [chosen, whole.losses, rest.losses, steps_left(whole), steps_left(rest)]


def test_auto_that_chose_one_goes_on_bitwise(tmp_path: Path) -> None:
    for chosen, whole, rest, *left in run_distributed(_auto, 2, str(tmp_path)):
        assert chosen == 1
        assert len(rest) == 46 - 32 > LEFT and whole[-len(rest) :] == rest
        assert left == [[], []], "both have tried micro-batches"


# -- before it is decided


class LooksUpTwice(OnlyBags):
    """TorchRec would update rows twice in the third step."""

    def scores(self, batch: Batch) -> Tensor:
        again = super().scores(batch) if self.trainer.global_step == 2 else 0
        return super().scores(batch) + again


class LooksOthersUpTwice(OnlyBags):
    """One rank looks another collection up twice in the third step: TorchRec might wait there for ranks that wait here."""

    def __init__(self) -> None:
        super().__init__()
        self.others = EmbeddingBagCollection(tables=configs({"other": (40, 8, ["other"], SUM)}))

    def scores(self, batch: Batch) -> Tensor:
        samples = len(batch["label"])
        ids = KeyedJaggedTensor(["other"], torch.arange(samples), lengths=torch.ones(samples, dtype=torch.int32))
        times = 1 + (self.trainer.global_step == 2 and self.global_rank == 0)
        others = sum(self.others(ids).values().mean(dim=1) for _ in range(times))
        return super().scores(batch) + others


def _resumed(folder: str, make: type[OnlyBags], steps: list[int]) -> list[Any]:
    data, ends = 8 * 14, {"max_epochs": 1}
    runs = [make()]
    fit(runs[0], data, **ends, **saving(folder))
    for step in steps:
        module = make()
        runs.append(module)
        fit(module, data, resume=f"{folder}/step={step}.ckpt", **ends)
    return [(module.losses, steps_left(module)) for module in runs]


@pytest.mark.parametrize(
    ("make", "expected", "saved"),
    [
        (OnlyBags, list(range(LEFT, 14)), [1, 7, DECIDING_STEPS, DECIDING_STEPS + 1, DECIDING_STEPS + 2]),
        (LooksUpTwice, [], [3, 4]),
        (LooksOthersUpTwice, [], [3, 4]),
    ],
)
def test_what_was_counted_is_in_the_checkpoint(
    make: type[OnlyBags], expected: list[int], saved: list[int], tmp_path: Path
) -> None:
    for (losses, left), *resumed in run_distributed(_resumed, 2, str(tmp_path), make, saved):
        assert left == expected
        for step, (rest, left_then) in zip(saved, resumed, strict=True):
            assert rest == losses[step:]
            assert left_then == [each for each in expected if each >= step], f"resumed from step {step}"
    torch.load(tmp_path / "step=1.ckpt", weights_only=True)


def _saved_after_a_fit(path: str) -> list[int]:
    first, rest = OnlyBags(), OnlyBags()
    fit(first, 8 * 4, max_epochs=1).save_checkpoint(path)
    fit(rest, 8 * 4, resume=path, max_epochs=4)
    return steps_left(rest)


def test_what_a_fit_has_counted_is_in_a_checkpoint_after_it(tmp_path: Path) -> None:
    assert run_distributed(_saved_after_a_fit, 2, str(tmp_path / "after.ckpt")) == [[*range(LEFT, 16)]] * 2


def _on_fewer_ranks(path: str) -> list[int]:
    module = OnlyBags()
    fit(module, 8 * 14, resume=path, max_epochs=1)
    return steps_left(module)


def test_another_number_of_ranks_counts_anew(tmp_path: Path) -> None:
    """On one rank nothing crosses, so nothing is left."""
    run_distributed(_resumed, 2, str(tmp_path), OnlyBags, [])
    for step in (7, DECIDING_STEPS, DECIDING_STEPS + 2):
        assert run_distributed(_on_fewer_ranks, 1, f"{tmp_path}/step={step}.ckpt") == [[]]
