"""How many steps share their samples out, where a callback says how many batches make an optimizer step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions


@pytest.mark.parametrize(
    ("schedules", "window"),
    [
        ([], 3),
        ([{0: 4}], 4),
        ([{0: 4, 2: 4}], 4),
        ([{0: 4}, {1: 4}], 1),
        ([{0: 1, 1: 4}], 1),
        ([{1: 4}], 1),
        ([{0: 4}, {0: 4}], 4),
    ],
)
def test_a_schedule_that_does_not_change_is_a_window(schedules: list[dict[int, int]], window: int) -> None:
    """Before its first epoch the Trainer still has ``accumulate_grad_batches=1``."""
    data = FreeScaleDataModule(list(range(32)), np.arange(1.0, 33), 4, balance=BalanceOptions(window=True))
    trainer: Any = SimpleNamespace(
        callbacks=[GradientAccumulationScheduler(schedule) for schedule in schedules],
        accumulate_grad_batches=1 if schedules else 3,
        global_rank=0,
        world_size=2,
        current_epoch=0,
        limit_train_batches=1.0,
        strategy=SimpleNamespace(root_device=SimpleNamespace(type="cpu")),
    )
    data.trainer = trainer
    assert data.train_dataloader().sampler.window == window
