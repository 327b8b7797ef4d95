"""Gradients accumulated for an optimizer step that is still to come: each rank's own, so that a run can resume before it."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_freescale._objects import gather_objects

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine


def gather_window(module: nn.Module, sharded: Container[str], engine: OverlapEngine | None) -> list[dict[str, Any]]:
    """Return what every rank has accumulated, by rank. Collective on the default group; drain ``engine`` first.

    Args:
        module: whose dense parameters hold gradients.
        sharded: names of its parameters that do not.
        engine: has those of the tables; None without.
    """
    named = ((name, p.grad) for name, p in module.named_parameters() if name not in sharded)
    dense = {name: grad.detach().cpu() for name, grad in named if grad is not None}
    return gather_objects({"dense": dense, "tables": {} if engine is None else engine.accumulated_gradients()})


def restore_window(window: list[dict[str, Any]], module: nn.Module, engine: OverlapEngine | None) -> None:
    """Take this rank's part of a window, before the first step.

    Raises:
        ValueError: the window is of another number of ranks, or of tables that were sharded otherwise.
    """
    if len(window) != dist.get_world_size():
        raise ValueError(
            f"the checkpoint was written on {len(window)} ranks, between two optimizer steps: each of them has accumulated "
            f"gradients of its own, and this run has {dist.get_world_size()}. Resume on {len(window)} ranks, or from a "
            "checkpoint that was written after an optimizer step"
        )
    mine = window[dist.get_rank()]
    parameters = dict(module.named_parameters())
    for name, grad in mine["dense"].items():
        parameters[name].grad = grad.to(parameters[name].device)
    if engine is not None:
        engine.restore_accumulated(mine["tables"])
