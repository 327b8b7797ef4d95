"""A training step that runs ahead of time puts back whatever it changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.dry_running import Model, dry_run, example_batch

RAN: list[str] = []
"""A global, which no dry run puts back; it would a list in a closure."""

SIDE_EFFECTS: dict[str, Callable[[Model, dict[str, Any]], Any]] = {
    "torch": lambda model, batch: torch.rand(3),
    "python": lambda model, batch: random.random(),
    "numpy": lambda model, batch: np.random.rand(),
    "own generator": lambda model, batch: torch.rand(3, generator=model.generator),
    "own numpy generator": lambda model, batch: model.numbers.random(),
    "batch norm": lambda model, batch: model.norm(batch["dense"]),
    "metric": lambda model, batch: model.metric(batch["dense"]),
    "list metric": lambda model, batch: model.mean.update(batch["dense"]),
    "buffer": lambda model, batch: model.queue.add_(1),
    "buffer replaced": lambda model, batch: setattr(model, "queue", torch.ones(3)),
    "list": lambda model, batch: model.losses.append(1.0),
    "nested list": lambda model, batch: model.counters["steps"].append(1),
    "parameter": lambda model, batch: model.teacher.add_(1),
    "parameter's data": lambda model, batch: model.teacher.data.add_(1),
    "parameter's data replaced": lambda model, batch: setattr(model.teacher, "data", model.teacher.data + 1),
    "trained parameter": lambda model, batch: model.norm.weight.data.mul_(2),
    "compiled module": lambda model, batch: model.compiled(batch["dense"]),
    "number": lambda model, batch: setattr(model, "step", model.step + 1),
    "new attribute": lambda model, batch: setattr(model, "extra", 1),
    "training mode": lambda model, batch: model.eval(),
    "hook": lambda model, batch: model.norm.register_forward_hook(print),
    "popped": lambda model, batch: batch.pop("dense"),
    "changed": lambda model, batch: batch["dense"].mul_(2),
    "ids changed": lambda model, batch: batch["users"].values().add_(1),
    "names": lambda model, batch: batch["names"].append("c"),
    "log": lambda model, batch: model.log("early", 1.0),
    "log_dict": lambda model, batch: model.log_dict({"early": 1.0}),
}


def _trace(model: Model, batch: dict[str, Any]) -> Any:
    """Everything that a side effect could have changed."""
    numbers = np.random.get_state()
    return repr(
        [
            [torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2:]],
            [model.generator.get_state().tolist(), model.numbers.bit_generator.state],
            [(name, tensor.tolist()) for name, tensor in model.state_dict().items()],
            [[sorted(vars(module)), module.training, len(module._forward_hooks)] for module in model.modules()],
            [float(model.metric.mean_value), float(model.metric.weight), model.metric._update_count, model.mean.value],
            [model.losses, model.counters, model.step, model.after],
            sorted(batch),
            [batch["ids"].tolist(), batch["dense"].tolist(), batch["users"].values().tolist(), batch["names"]],
        ]
    )


@pytest.mark.parametrize("name", list(SIDE_EFFECTS))
def test_leaves_no_trace(name: str) -> None:
    RAN.clear()

    def effect(model: Model, batch: dict[str, Any]) -> None:
        SIDE_EFFECTS[name](model, batch)
        RAN.append(name)

    model, batch = Model(effect), example_batch()
    before, attributes = _trace(model, batch), {key: id(value) for key, value in vars(model).items()}
    children = [id(module) for module in model.modules()]
    versions = [buffer._version for buffer in model.buffers()]
    result = dry_run(model, batch)
    assert result.error is None and RAN
    assert _trace(model, batch) == before
    assert {key: id(value) for key, value in vars(model).items()} == attributes
    assert [id(module) for module in model.modules()] == children
    assert [buffer._version for buffer in model.buffers()] == versions, "autograd may have saved them"


@pytest.mark.parametrize("name", sorted(set(SIDE_EFFECTS) - {"log", "log_dict", "popped"}))
def test_the_side_effects_are_real(name: str) -> None:
    model, batch = Model(), example_batch()
    before = _trace(model, batch)
    SIDE_EFFECTS[name](model, batch)
    assert _trace(model, batch) != before


def _raise(model: Model, batch: dict[str, Any]) -> None:
    model.queue.add_(1)
    raise ValueError("no such thing")


def test_an_error_of_the_step_is_returned() -> None:
    model, batch = Model(_raise), example_batch()
    before = _trace(model, batch)
    result = dry_run(model, batch)
    assert result.features == {} and isinstance(result.error, ValueError)
    assert _trace(model, batch) == before


def test_an_interrupt_passes_and_leaves_no_trace() -> None:
    def interrupt(model: Model, batch: dict[str, Any]) -> None:
        model.queue.add_(1)
        raise KeyboardInterrupt

    model, batch = Model(interrupt), example_batch()
    before = _trace(model, batch)
    with pytest.raises(KeyboardInterrupt):
        dry_run(model, batch)
    assert _trace(model, batch) == before
