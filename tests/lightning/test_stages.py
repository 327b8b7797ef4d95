"""The stages of a strategy's steps with modules of many kinds. The strategy is restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_freescale._lightning.profiler import ObservedLoader, stages_on
from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, fit

STAGES = ["fetch", "batch to device", "forward", "backward", "optimizer"]


class Watch(L.Callback):
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
        assert "_sync_buffers" not in vars(trainer.strategy.model)  # as it is before the teardown
        methods = ("process_dataloader", "batch_to_device", "training_step", "backward", "optimizer_step")
        assert not [name for name in methods if name in vars(trainer.strategy)]


def _watched(module: L.LightningModule, steps: int = 4, **options: Any) -> list[StepRecord]:
    watch = Watch()
    fit(module, [watch], steps=steps, **{"devices": 1, "strategy": "auto", **options})
    return watch.steps


def _names(step: StepRecord, *among: str) -> list[str]:
    assert all(span.end is not None and span.end >= span.start for span in step.spans)
    return [span.name for span in step.spans if span.name in (among or STAGES)]


def _in_a_row(spans: Any) -> bool:
    return all(before.end <= after.start for before, after in zip(spans, spans[1:]))


def test_the_stages_of_a_step_one_after_the_other() -> None:
    """Validation comes in a step that is open, two batches after each: only the training loader is observed."""
    for options in ({}, {"val_check_interval": 1}):
        steps = _watched(Plain(), **options)
        assert len(steps) == 4
        for step in steps:
            assert _names(step, *STAGES[2:]) == STAGES[2:] and (options or _names(step, *STAGES[1:]) == STAGES[1:])
            assert options or _in_a_row(step.spans)
        kinds = {span.name: span.kind for step in steps for span in step.spans}
        assert kinds == {"fetch": "data", "batch to device": "data", **{name: name for name in STAGES[2:]}}
        assert 3 + (not options) <= sum(_names(step).count("fetch") for step in steps) <= 5


class Skipping(Plain):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def test_a_training_step_that_returns_nothing_has_no_backward() -> None:
    found = [_names(step, "forward", "backward") for step in _watched(Skipping())]
    assert found == [["forward", "backward"], ["forward"]] * 2


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
    steps = _watched(module, steps=2)
    for step in steps:
        names = _names(step, *STAGES[2:])
        assert len(names) > 3 and names == STAGES[2:] * (len(names) // 3) and _in_a_row(step.spans)
    assert sum(_names(step).count("forward") for step in steps) == module.evaluations
    weights = []
    for callbacks in ([Watch()], [Watch(recording=False)], []):
        torch.manual_seed(0)
        module = Searching()
        fit(module, callbacks, steps=3, devices=1, strategy="auto")
        weights.append(module.layer.weight.tolist())
    assert weights[0] == weights[1] == weights[2], "what is computed stays the same"


class Manual(Plain):
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
    for step in _watched(Manual()):
        stages = [span for span in step.spans if span.kind != "data"]
        assert [span.name for span in stages] == ["forward", "backward", "optimizer", "backward", "optimizer"]
        assert all(span.start >= stages[0].start and span.end <= stages[0].end for span in stages[1:])
        assert _in_a_row(stages[1:])


def test_the_strategys_own_methods_come_back_whatever_happens() -> None:
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    own = strategy.backward
    strategy.backward = own  # a user's own, on the instance
    before = dict(vars(strategy))
    with stages_on(Timeline(), strategy):
        assert len(vars(strategy)) == len(before) + 4
    assert vars(strategy) == before
    with pytest.raises(KeyError), stages_on(Timeline(), strategy):
        raise KeyError
    assert vars(strategy) == before
    assert strategy.training_step.__func__ is SingleDeviceStrategy.training_step


class Stateful:
    worker_init_fn: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {"at": 2}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def test_the_observed_loader_looks_like_the_loader() -> None:
    loader = Stateful()
    observed = ObservedLoader(loader, Timeline())
    observed.worker_init_fn = print
    assert loader.worker_init_fn is print and isinstance(observed, _Stateful)
    observed.load_state_dict(observed.state_dict())
    assert loader.loaded == {"at": 2} and list(observed) == [0, 1, 2]
    assert not hasattr(ObservedLoader([1], Timeline()), "state_dict")


# -- what is waited for under DDP


class Wide(Plain):
    """Another layer that is frozen, and one whose gradients fill more than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.frozen = torch.nn.Linear(4, 1000, bias=False), torch.nn.Linear(4, 1000)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean() + self.more(batch).square().mean()


UNUSED: dict[str, Any] = {"find_unused_parameters": True}
CASES: dict[str, tuple[type[Plain], dict[str, Any], dict[str, Any]]] = {
    "plain": (Plain, {}, {}),
    "unused": (Plain, UNUSED, {}),
    "static": (Plain, {"static_graph": True}, {}),
    "accumulation": (Plain, {}, {"accumulate_grad_batches": 2}),
    "wide": (Wide, {}, {}),
    "manual": (Manual, {}, {}),
}


def test_ddps_waits_for_gradients_and_buffers_are_collectives() -> None:
    def run() -> dict[str, list[list[tuple[str, int]]]]:
        found = {}
        for name, (module, ddp, options) in CASES.items():
            steps = _watched(module(), devices=2, strategy=DDPStrategy(**ddp), **options)
            assert all(c.start <= c.end for step in steps for c in step.collectives)
            found[name] = [[(c.name, c.moved) for c in step.collectives] for step in steps]
        return found

    first, second = run_distributed(run, 2)
    assert first == second
    # two ranks exchange five floats: each sends them once per backward that does not only accumulate
    once = [("dense gradients", 20)]
    assert [first[name] for name in ("plain", "unused", "static")] == [[once] * 4] * 3
    assert first["accumulation"] == [[], once] * 2 and first["manual"] == [once * 2] * 4
    assert first["wide"][0][0][1] == 4 * (5 + 4000), "the bytes of the last bucket, of what is trained"
