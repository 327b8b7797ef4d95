"""The stages of a strategy's steps, whatever the module does in them; the strategy is as before afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_freescale._lightning.stages import stages_on
from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, Rows, fit


class Watch(L.Callback):
    """Records every step of a fit."""

    def __init__(self, recording: bool = True) -> None:
        self.timeline, self.stack, self.steps = Timeline(), ExitStack(), []
        self.recording = recording

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        if self.recording:
            self.timeline.enable(torch.device("cpu"))
        self.stack.enter_context(stages_on(self.timeline, trainer.strategy))

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        self.timeline.open_step()

    def on_train_batch_end(self, *_: Any) -> None:
        step = self.timeline.close_step()
        self.steps += [] if step is None else [step]
        self.timeline.open_step(None if step is None else step.end)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.stack.close()
        self.model = trainer.strategy.model  # as it is before the teardown
        methods = ("process_dataloader", "batch_to_device", "training_step", "backward", "optimizer_step")
        assert not [name for name in methods if name in vars(trainer.strategy)]


def _watched(module: L.LightningModule, steps: int = 3, **options: Any) -> Watch:
    watch = Watch()
    fit(module, [watch], steps=steps, **{"devices": 1, "strategy": "auto", **options})
    return watch


def _names(step: StepRecord) -> list[str]:
    assert all(span.end is not None and span.end >= span.start for span in step.spans)
    return [span.name for span in step.spans]


def _in_a_row(step: StepRecord) -> bool:
    return all(before.end <= after.start for before, after in zip(step.spans, step.spans[1:]))


STAGES = ["fetch", "batch to device", "forward", "backward", "optimizer"]


def test_the_stages_of_a_step_one_after_the_other() -> None:
    watch = _watched(Plain(), steps=4)
    assert len(watch.steps) == 4
    for step in watch.steps:
        assert [name for name in _names(step) if name != "fetch"] == STAGES[1:]
        assert _in_a_row(step)
    kinds = {span.name: span.kind for step in watch.steps for span in step.spans}
    assert kinds == {"fetch": "data", "batch to device": "data", **{name: name for name in STAGES[2:]}}
    assert sum(_names(step).count("fetch") for step in watch.steps) >= 4


def test_only_the_training_loader_is_observed() -> None:
    """Validation comes in a step that is open: two batches after each."""
    steps = _watched(Plain(), steps=4, val_check_interval=1).steps
    assert 3 <= sum(_names(step).count("fetch") for step in steps) <= 5
    watch = Watch()
    watch.timeline.enable(torch.device("cpu"))
    L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[watch]).validate(
        Plain(), DataLoader(Rows(4)), verbose=False
    )
    assert not watch.steps


class Skipping(Plain):
    """Every second batch is not trained on."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def test_a_training_step_that_returns_nothing_has_no_backward() -> None:
    steps = _watched(Skipping(), steps=4).steps
    assert [[name for name in _names(step) if name in ("forward", "backward")] for step in steps] == [
        ["forward", "backward"], ["forward"],
    ] * 2  # fmt: skip


class Searching(Plain):
    """LBFGS evaluates the closure several times a step."""

    def configure_optimizers(self) -> Any:
        self.evaluations = 0
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.evaluations += 1
        return super().training_step(batch / 10, batch_idx) + self.layer.weight.square().sum()


def test_every_closure_is_a_forward_and_a_backward_and_what_follows_the_optimizer() -> None:
    module = Searching()
    steps = _watched(module, steps=2).steps
    for step in steps:
        names = [name for name in _names(step) if name in STAGES[2:]]
        closures = len(names) // 3
        assert closures > 1
        assert names == STAGES[2:] * closures
        assert _in_a_row(step)
    assert sum(_names(step).count("forward") for step in steps) == module.evaluations


class Manual(Plain):
    """Steps twice in a training step, once with a closure."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.layer(batch).square().mean()
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        closure()
        optimizer.step()
        optimizer.step(closure)


def test_manual_optimization_is_seen_inside_the_training_step() -> None:
    for step in _watched(Manual()).steps:
        stages = [span for span in step.spans if span.kind != "data"]
        assert [span.name for span in stages] == ["forward", "backward", "optimizer", "backward", "optimizer"]
        assert all(span.start >= stages[0].start and span.end <= stages[0].end for span in stages[1:])
        assert all(before.end <= after.start for before, after in zip(stages[1:], stages[2:]))


def test_what_is_computed_stays_the_same() -> None:
    weights = []
    for callbacks in ([Watch()], [Watch(recording=False)], []):
        torch.manual_seed(0)
        module = Searching()
        fit(module, callbacks, steps=3, devices=1, strategy="auto")
        weights.append(module.layer.weight.tolist())
    assert weights[0] == weights[1] == weights[2]


def test_the_strategys_own_methods_come_back_whatever_happens() -> None:
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    own = strategy.backward
    strategy.backward = own  # somebody's own, on the instance
    before = dict(vars(strategy))
    with stages_on(Timeline(), strategy):
        assert len(vars(strategy)) == len(before) + 4
    assert vars(strategy) == before
    with pytest.raises(KeyError), stages_on(Timeline(), strategy):
        raise KeyError
    assert vars(strategy) == before
    assert strategy.training_step.__func__ is SingleDeviceStrategy.training_step


class Wide(Plain):
    """Another layer that is frozen, and one whose gradients fill more than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(4, 1000, bias=False)
        self.frozen = torch.nn.Linear(4, 1000)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean() + self.more(batch).square().mean()


def _waits(module: L.LightningModule, ddp: dict[str, Any], **options: Any) -> list[list[tuple[str, int, bool]]]:
    steps = _watched(module, 4, devices=2, strategy=DDPStrategy(**ddp), **options).steps
    assert dist.get_world_size() == 2
    return [[(c.name, c.moved, c.start <= c.end) for c in step.collectives] for step in steps]


@pytest.mark.parametrize("ddp", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddps_wait_for_its_gradients_is_seen_once_per_backward(ddp: dict[str, Any]) -> None:
    first, second = run_distributed(_waits, 2, Plain(), ddp)
    assert first == second == [[("dense gradients", 20, True)]] * 4, "two ranks exchange five floats: each sends them once"


class Normed(Plain):
    """Running statistics are buffers, which DDP takes from rank 0 in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def _buffers() -> tuple[list[list[str]], bool]:
    watch = _watched(Normed(), 3, devices=2, strategy=DDPStrategy(), num_sanity_val_steps=0)
    return [[c.name for c in step.collectives] for step in watch.steps], "_sync_buffers" in vars(watch.model)


def test_ddps_broadcast_of_buffers_is_a_collective() -> None:
    assert run_distributed(_buffers, 2) == [([["buffers", "dense gradients"]] * 3, False)] * 2


def test_not_in_a_backward_that_only_accumulates() -> None:
    waits = run_distributed(_waits, 2, Plain(), {}, accumulate_grad_batches=2)[0]
    assert [len(step) for step in waits] == [0, 1, 0, 1]


def test_the_bytes_of_the_last_bucket_and_of_what_is_trained() -> None:
    """Another limit changes nothing: DDP lets its first bucket hold 1 MB."""
    for ddp in ({}, {"bucket_cap_mb": 0.01}):
        assert run_distributed(_waits, 2, Wide(), ddp)[0][0][0][1] == 4 * (5 + 4000)


def test_manual_optimization_under_ddp(tmp_path: Path) -> None:
    assert [len(step) for step in run_distributed(_waits, 2, Manual(), {})[0]] == [2] * 4
