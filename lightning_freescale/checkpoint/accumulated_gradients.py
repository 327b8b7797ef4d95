"""Gradients accumulated for an optimizer step that is still to come: each rank's own, so that a run can resume before it."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._object_gather import gather_objects, gather_on_first_rank

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine


def gather_accumulated(
    wait: bool, module: nn.Module, sharded: Container[str], engine: OverlapEngine | None
) -> list[dict[str, Any]]:
    """Return on rank 0 what every rank has accumulated; nothing if no rank has, and on the others. Collective.

    Args:
        wait: whether this rank has.
        module: whose dense parameters hold gradients.
        sharded: names of its parameters that do not.
        engine: has those of the tables, drained; None without.
    """
    if not any(gather_objects(wait)):
        return []
    named = ((name, p.grad) for name, p in module.named_parameters() if name not in sharded)
    dense = {name: grad.detach().cpu() for name, grad in named if grad is not None}
    return gather_on_first_rank({"dense": dense, "tables": {} if engine is None else engine.accumulated_gradients()})


def restore_accumulated(
    ranks: list[dict[str, Any]], module: nn.Module, sharded: Container[str], wrapped: nn.Module, engine: OverlapEngine | None
) -> None:
    """Take this rank's part of what :func:`gather_accumulated` has returned, before the first step.

    Args:
        ranks: of every rank.
        module: as there.
        sharded: as there.
        wrapped: the module, or the DistributedDataParallel around it.
        engine: as there.

    Raises:
        ValueError: it is of another number of ranks, or of parameters or tables that are not there now.
    """
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"the checkpoint was written on {len(ranks)} ranks, between two optimizer steps: each of them has accumulated "
            f"gradients of its own, and this run has {dist.get_world_size()}. Resume on {len(ranks)} ranks, or from a "
            "checkpoint that was written after an optimizer step"
        )
    mine = ranks[dist.get_rank()]
    dense = {name: parameter for name, parameter in module.named_parameters() if name not in sharded}
    there = {*dense, *(() if engine is None else engine.collections)}
    if gone := [name for name in (*mine["dense"], *mine["tables"]) if name not in there]:
        raise ValueError(
            f"the checkpoint was written between two optimizer steps and has accumulated gradients of {gone}, which are no "
            "parameters, or no overlapped collections, of this run: resume with the same module, shard= and overlap=, or "
            "from a checkpoint that was written after an optimizer step"
        )
    used = [dense[name] for name in mine["dense"] if dense[name].requires_grad]
    if used and isinstance(wrapped, DistributedDataParallel) and wrapped.find_unused_parameters:
        # DDP notes in backward what a window uses: a parameter that no rank has used since would keep each rank's own gradient
        with wrapped.no_sync():
            torch.autograd.backward([p.view_as(p) for p in used], [torch.zeros_like(p) for p in used])
    for name, gradient in mine["dense"].items():
        dense[name].grad = gradient.to(dense[name].device)
    if engine is not None:
        engine.restore_accumulated(mine["tables"])
