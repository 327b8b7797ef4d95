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
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, BagSamples, Batch, OnlyBags, collate_bags, configs
from tests.helpers.recommender import REPEATS, trainer

LEFT = DECIDING_STEPS + 1
"""The first step of TorchRec's."""


def fit(module: OnlyBags, size: int, resume: str | None = None, **options: Any) -> L.Trainer:
    """Fit on the ranks of ``run_distributed``, 4 samples of each in a step."""
    torch.manual_seed(0)
    samples = BagSamples(size)
    loader = FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate_bags, balance=REPEATS)
    fitting = trainer(devices=int(os.environ["WORLD_SIZE"]), enable_checkpointing="callbacks" in options, **options)
    fitting.fit(module, loader, ckpt_path=resume)
    return fitting


def steps_left(module: OnlyBags) -> list[int]:
    return [step for step, left in module.left.items() if left]


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
    runs, kept = [make() for _ in (0, *steps)], ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(runs[0], 8 * 14, callbacks=[kept])
    for module, step in zip(runs[1:], steps):
        fit(module, 8 * 14, resume=f"{folder}/step={step}.ckpt")
    return [(module.losses, steps_left(module)) for module in runs]


def _saved_after_a_fit(path: str) -> list[int]:
    first, rest = OnlyBags(), OnlyBags()
    fit(first, 8 * 4).save_checkpoint(path)
    fit(rest, 8 * 4, resume=path, max_epochs=4)
    return steps_left(rest)


def _on_fewer_ranks(folder: str) -> list[list[int]]:
    modules = {f"{folder}/step={step}.ckpt": OnlyBags() for step in (7, DECIDING_STEPS, DECIDING_STEPS + 2)}
    for path, module in modules.items():
        fit(module, 8 * 14, resume=path)
    return [steps_left(module) for module in modules.values()]


@pytest.mark.parametrize(
    ("make", "expected", "saved"),
    [(OnlyBags, list(range(LEFT, 14)), [1, 7, DECIDING_STEPS, DECIDING_STEPS + 1]), (LooksOthersUpTwice, [], [3])],
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
    if make is OnlyBags:  # on one rank nothing crosses, so nothing is left
        assert run_distributed(_on_fewer_ranks, 1, str(tmp_path)) == [[[]] * 3]
        assert run_distributed(_saved_after_a_fit, 2, str(tmp_path / "after.ckpt")) == [[*range(LEFT, 16)]] * 2
