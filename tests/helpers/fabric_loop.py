"""A loop over Lightning Fabric as its user writes it, for any strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_freescale import FreeScaleFabricStrategy
from tests.helpers.recommender import OPTIMIZERS, Net, fixed_loader


def fabric_for(strategy: Any = "freescale", precision: Any = None, **options: Any) -> Fabric:
    """On the ranks of ``run_distributed``; ``options`` are those of FreeScaleFabricStrategy."""
    chosen = FreeScaleFabricStrategy(**options) if options else strategy
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=chosen, precision=precision)
    fabric.launch()
    return fabric


def set_up(fabric: Fabric, optimizer: str = "adagrad", steps: int = 12, net: nn.Module | None = None) -> tuple[Any, Any, Any]:
    """Model, optimizer and loader, as ``fabric`` returns them."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    model, updates = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    loader = fabric.setup_dataloaders(fixed_loader(fabric.global_rank, steps), use_distributed_sampler=False)
    return model, updates, loader


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["features"]), batch["label"])


def run_loop(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    loader: Any,
    accumulate: int = 1,
    clip: Callable[[Any, Any], Any] | None = None,
) -> list[float]:
    """Losses of one pass."""
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
