"""Options of a parameter group that change while training: tables follow them in the same step, or refuse them before it."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel, Run, assert_same, fit
from tests.strategy.overlap.test_adam import every_row_loader

STEPS = 6
KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rowwise_adagrad": partial(RowWiseAdagrad, lr=0.1),
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
}
CHANGES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": lambda step: 0.3 / (1 + step)},
    "adagrad": {"lr": lambda step: 0.1 / (1 + step), "eps": lambda step: 0.02 * step},
    "rowwise_adagrad": {"lr": lambda step: 0.1 / (1 + step), "eps": lambda step: 0.02 * step},
    "adam": {"betas": lambda step: (0.9 - 0.1 * step, 0.999 - 0.05 * step), "eps": lambda step: 1e-8 + 0.02 * step},
    "adamw": {"betas": lambda step: (0.9 - 0.1 * step, 0.999 - 0.05 * step), "weight_decay": lambda step: 0.3 * step},
}


class InGroups(CountingModel):
    """The item table in a group of its own."""

    def configure_optimizers(self) -> Any:
        item = [p for name, p in self.named_parameters() if "item" in name]
        return KINDS[self.optimizer]([{"params": item}, {"params": [p for p in self.parameters() if p is not item[0]]}])


class OneCycle(InGroups):
    """Its schedule cycles the learning rate, and Adam's betas as well, which is the default."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Changes(L.Callback):
    """Sets options before every step, each group's in its own way."""

    def __init__(self, kind: str) -> None:
        self.changes = CHANGES[kind]

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for index, group in enumerate(trainer.optimizers[0].param_groups):
            group.update({name: change(max(batch_idx - index, 0)) for name, change in self.changes.items()})


def _fit(make: type[CountingModel], kind: str, strategy: Any, *callbacks: L.Callback) -> Run:
    torch.manual_seed(0)
    return fit(make(kind), every_row_loader(STEPS), strategy=strategy, callbacks=list(callbacks))


def _fits(cases: list[tuple[type[CountingModel], str]], options: dict[str, Any] | None) -> list[Run]:
    strategies = ["ddp" if options is None else FreeScaleStrategy(**options) for _ in cases]
    return [_fit(make, kind, each, *[Changes(kind)] * (make is InGroups)) for (make, kind), each in zip(cases, strategies)]


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        ({}, [(InGroups, kind) for kind in KINDS] + [(OneCycle, "adam")]),
        ({"overlap": False}, [(InGroups, kind) for kind in KINDS if "adam" not in kind]),
    ],
)
def test_tables_follow_every_option(options: dict[str, Any], cases: list[tuple[type[CountingModel], str]]) -> None:
    """As under "ddp", where every row is in every batch."""
    mine, ddp = (run_distributed(_fits, 2, cases, each) for each in (options, None))
    for run, expected in zip(mine[0], ddp[0]):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same(run.weights, expected.weights, rtol=1e-4, atol=1e-6)
        assert_same(run.states[0]["state"], expected.states[0]["state"], rtol=1e-4, atol=1e-7)


class Sets(L.Callback):
    """Sets one option in the middle of training."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.optimizers[0].param_groups[1][self.name] = self.value


REFUSED = [
    ("sgd", "momentum", 0.9),
    ("sgd", "weight_decay", 0.1),
    ("adagrad", "lr_decay", 0.1),
    ("rowwise_adagrad", "maximize", True),
    ("adam", "weight_decay", 0.1),
    ("adamw", "amsgrad", True),
]


def _refusals(overlap: bool) -> list[tuple[str, int]]:
    found = []
    for kind, name, value in REFUSED if overlap else REFUSED[:4]:
        torch.manual_seed(0)
        module = InGroups(kind)
        with pytest.raises(ValueError, match="parameter group") as error:
            fit(module, every_row_loader(STEPS), strategy=FreeScaleStrategy(overlap=overlap), callbacks=[Sets(name, value)])
        found.append((str(error.value), len(module.losses)))
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_what_tables_cannot_follow_is_refused_before_the_step(overlap: bool) -> None:
    for found in run_distributed(_refusals, 2, overlap):
        for (message, steps), (_, name, value) in zip(found, REFUSED):
            was = 0 if not isinstance(value, bool) else False
            assert "parameter group 1 of " in message
            assert "embedding table 'net.embeddings.embeddings.cat.weight'" in message
            assert f"its {name} was changed from {was!r} to {value!r}" in message
            assert f"leave it at {was!r}" in message
            assert steps == 3
