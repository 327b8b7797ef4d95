"""A callback that trains for a while inside of a fit, and puts everything back: Lightning's LearningRateFinder."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_freescale.testing import run_distributed
from tests.helpers.micro_batch_training import run
from tests.helpers.overlap_training import CountingModel, assert_same


class Found(CountingModel):
    """Trains at the learning rate that was found for it."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def _fitted() -> list[dict[str, Any]]:
    runs = []
    for strategy, micro_batches in (("ddp", 1), ("freescale", 1), ("freescale", 2)):
        finder = LearningRateFinder(min_lr=0.01, max_lr=1.0, num_training_steps=4, early_stop_threshold=None)
        runs.append(run(micro_batches, strategy, Found, callbacks=[finder]))
    return runs


def test_the_run_is_that_of_ddp() -> None:
    ddp, *mine = run_distributed(_fitted, 2)[0]
    assert len(ddp["ended"]) > 4
    for each in mine:
        assert [step[:2] for step in each["ended"]] == [step[:2] for step in ddp["ended"]]
        assert_same(each["weights"], ddp["weights"], rtol=1e-5, atol=1e-6)
        assert_same(each["optimizer"], ddp["optimizer"], rtol=1e-5, atol=1e-7)
