"""A loop over Lightning Fabric as its user writes it, for any strategy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_freescale import FreeScaleFabricStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import OPTIMIZERS, Net, fixed_loader

_in_use: list[Fabric] = []


def fabric_for(strategy: Any = "freescale", precision: Any = None, **options: Any) -> Fabric:
    """On the ranks of ``run_distributed``; ``options`` are those of FreeScaleFabricStrategy. Ends the one before."""
    while _in_use:
        _in_use.pop().strategy.teardown()
    chosen = FreeScaleFabricStrategy(**options) if options else strategy
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=chosen, precision=precision)
    fabric.launch()
    _in_use.append(fabric)
    return fabric


def run_all(ranks: int, *calls: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Call functions one after the other on the same ranks; return the results of all ranks for each."""
    return list(zip(*run_distributed(lambda: [call() for call in calls], ranks)))


def assert_refused(misuses: Mapping[str, Callable[[Fabric], None]]) -> None:
    """Assert that each misuse of a new Fabric raises an error with its pattern, on two ranks."""

    def run() -> dict[str, str]:
        told = dict[str, str]()
        for pattern, misuse in misuses.items():
            try:
                misuse(fabric_for())
                told[pattern] = "no error"
            except (RuntimeError, ValueError) as error:
                told[pattern] = str(error)
        return told

    for told in run_distributed(run, 2):
        assert {pattern: error for pattern, error in told.items() if not re.search(pattern, error)} == {}


def set_up(fabric: Fabric, optimizer: str = "adagrad", steps: int = 12, net: nn.Module | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = Net() if net is None else net
    model, updates = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    loader = fabric.setup_dataloaders(fixed_loader(fabric.global_rank, steps), use_distributed_sampler=False)
    return model, updates, loader


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["features"]), batch["label"])


def run_loop(
    fabric: Fabric, model: Any, optimizer: Any, loader: Any, accumulate: int = 1, clip: Callable[[Any, Any], Any] | None = None
) -> list[float]:
    losses = []
    for index, batch in enumerate(loader):
        last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, batch)
            fabric.backward(loss / accumulate)
        if last:
            if clip is not None:
                clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(fabric: Fabric, model: Any, optimizer: Any) -> dict[str, Any]:
    """Unsharded weights and optimizer states, on rank 0."""
    weights = fabric.strategy.get_module_state_dict(model._forward_module)
    return {"weights": {name: value.clone() for name, value in weights.items()}, "optimizer": optimizer.state_dict()}
