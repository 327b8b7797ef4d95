"""``FreeScaleStrategy(split_backward=True)``: the rows' gradients are on their way before those of the weights are there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel, Run, assert_bitwise, fit, my_loader

STEPS = 6


class NotesOrder(CountingModel):
    """Notes at each weight's gradient whether the rows' had been handed over by then."""

    def on_fit_start(self) -> None:
        self.handed_over: list[bool] = []
        for layer in (self.net.hidden[0], self.net.hidden[2]):
            layer.weight.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        strategy: Any = self.trainer.strategy
        engine = strategy.overlap_controller.engine
        self.handed_over.append(all(each.jobs.current.gradient_sent for each in engine.collections.values()))


def _fits(options: dict[str, Any]) -> tuple[tuple[Run, Run], list[bool], list[bool]]:
    runs, orders = [], []
    for split in (False, True):
        torch.manual_seed(0)
        model = NotesOrder("rowwise_adagrad")
        runs.append(fit(model, my_loader(STEPS), strategy=FreeScaleStrategy(split_backward=split), **options))
        orders.append(model.handed_over)
    return (runs[0], runs[1]), *orders


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]
)
def test_same_bits_and_rows_first(options: dict[str, Any]) -> None:
    results = run_distributed(partial(_fits, options), 2)
    assert_bitwise([runs for runs, *_ in results])
    for _, plain, split in results:
        assert len(plain) == len(split) == 2 * STEPS
        assert not any(plain)
        if "accumulate_grad_batches" in options:  # nobody waits for a batch without an update
            expected = [number // 2 % 2 == 1 for number in range(2 * STEPS)]
            assert split == expected
        else:
            assert all(split)
