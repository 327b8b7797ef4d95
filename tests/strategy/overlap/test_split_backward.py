"""``FreeScaleStrategy(split_backward=True)``: the rows' gradients are on their way before those of the weights are there."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.micro_batch_training import data
from tests.helpers.overlap_training import CountingModel, Run, assert_bitwise, fit, my_loader
from tests.helpers.recommender import trainer

STEPS = 6


class NotesOrder(CountingModel):
    """Notes at each weight's gradient whether the rows' had been handed over by then."""

    def on_fit_start(self) -> None:
        self.handed_over: list[bool] = []
        for layer in (self.net.hidden[0], self.net.hidden[2]):
            layer.weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, weight: Tensor) -> None:
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


class LeavesOut(NotesOrder):
    """Its last micro-batch of a step goes round a layer."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.trainer.strategy._accumulating:
            return super().training_step(batch, batch_idx)
        found = self.net.embeddings(batch["features"])
        return sum(each.values().mean() for each in found.values()) + sum(p.sum() for p in self.net.hidden.parameters())


def _divided(make: type[NotesOrder], unused: bool = False) -> tuple[list[Any], list[int], list[bool]]:
    found, notes = [], []
    for split in (False, True):
        torch.manual_seed(0)
        model = make("rowwise_adagrad")
        strategy = FreeScaleStrategy(split_backward=split, find_unused_parameters=unused)
        fitting = trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=2)
        fitting.fit(model, datamodule=data(2, val_dataset=None))
        found.append(fitting._checkpoint_connector.dump_checkpoint(weights_only=False))
        notes.append(model.handed_over)
    return found, [len(handed_over) for handed_over in notes], notes[1]


@pytest.mark.parametrize("unused", [False, True])
def test_micro_batches_have_their_weights_gradients_at_the_end_of_the_step(unused: bool) -> None:
    for (whole, split), (hooks, hooks_split), handed_over in run_distributed(_divided, 2, NotesOrder, unused):
        for name, weight in whole["state_dict"].items():
            assert torch.equal(weight, split["state_dict"][name])
        assert hooks_split == (hooks if unused else hooks // 2)
        assert handed_over == [True] * hooks_split if not unused else any(handed_over)


def test_a_last_micro_batch_that_leaves_layers_out_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the last micro-batch has not used layers"):
        run_distributed(_divided, 2, LeavesOut)
