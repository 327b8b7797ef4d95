"""The state of a run besides parameters and optimizer: accumulated gradients, random states, and the order of DDP's buckets."""

from __future__ import annotations

import random
import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._runtime.object_gather import gather_objects, gather_on_first_rank

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine


def gather_accumulated(
    wait: bool, module: nn.Module, sharded: Container[str], engine: OverlapEngine | None
) -> list[dict[str, Any]]:
    """Return on rank 0 the accumulated gradients of every rank; an empty list if there are none. Collective.

    Args:
        wait: whether this rank has accumulated gradients.
        module: the module, whose dense parameters hold gradients.
        sharded: names of its parameters that do not.
        engine: the drained engine, which holds the gradients of the tables; None without overlap.
    """
    if not any(gather_objects(wait)):
        return []
    named = ((name, p.grad) for name, p in module.named_parameters() if name not in sharded)
    dense = {name: grad.detach().cpu() for name, grad in named if grad is not None}
    return gather_on_first_rank({"dense": dense, "tables": {} if engine is None else engine.accumulated_gradients()})


def restore_accumulated(
    ranks: list[dict[str, Any]], module: nn.Module, sharded: Container[str], wrapped: nn.Module, engine: OverlapEngine | None
) -> None:
    """Restore this rank's part of a result of :func:`gather_accumulated`, before the first step.

    Args:
        ranks: the result.
        module: as for :func:`gather_accumulated`.
        sharded: as for :func:`gather_accumulated`.
        wrapped: the module, or the DistributedDataParallel around it.
        engine: as for :func:`gather_accumulated`.

    Raises:
        ValueError: the result has another number of ranks, or parameters or tables that this run does not have.
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


def gather_random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of torch, ``device``, numpy and Python on every rank, by rank. Collective on the default group."""
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = numpy_state
    mine = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    return gather_objects(mine)


def set_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """Set this rank's state; with another world size warn and change nothing."""
    if len(states) != dist.get_world_size():
        warnings.warn(
            f"the checkpoint holds the random states of {len(states)} ranks, this run has {dist.get_world_size()}: dropout and "
            "other random draws go on from this run's seed",
            stacklevel=2,
        )
        return
    mine = states[dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    if device.type == "cuda" and mine["cuda"] is not None:
        torch.cuda.set_rng_state(mine["cuda"], device)
    keys, *rest = mine["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = mine["python"]
    random.setstate((version, tuple(internal), gauss))


# -- the order of DDP's buckets
#
# DDP lays out its buckets after its first step, in the order in which gradients come. Over three or more ranks, the rounding of
# an element's sum depends on its place in its bucket. A run that resumes has a new DDP, which must lay out the buckets ahead of
# its first step as the run before did.


@contextmanager
def noting_order(model: nn.Module | None, order: list[str]) -> Iterator[None]:
    """Add to ``order``, during a backward, the names of the parameters that DDP reduces, in the order of their gradients.

    ``order`` does not change if it holds names, if nothing is reduced, or if DDP never changes its buckets.
    """
    if order or not isinstance(model, DistributedDataParallel) or not _changes_buckets(model):
        yield
        return
    came: list[str] = []
    reduced = _reduced(model)
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
        for name, parameter in reduced.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(came) == len(reduced):
        order += came


def lay_out_buckets(model: nn.Module | None, order: Sequence[str]) -> bool:
    """Have DDP lay out its buckets for gradients in this order, and return whether it did. Collective.

    DDP reduces zeros once. If the module has other parameters than the run had, nothing is done.
    """
    if not isinstance(model, DistributedDataParallel) or not _changes_buckets(model) or not order:
        return False
    reduced = _reduced(model)
    if set(order) != set(reduced):
        return False
    kept = [(parameter, parameter.grad) for parameter in reduced.values()]
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    for name in order:
        (reduced[name] * 0).sum().backward()
    for parameter, gradient in kept:
        parameter.grad = gradient
    return True


def _changes_buckets(model: DistributedDataParallel) -> bool:
    # a static graph is learned in the first step, and a hook for communication may keep a state from call to call
    return model.require_backward_grad_sync and not (model.find_unused_parameters or model.static_graph or model._comm_hooks)


def _reduced(model: DistributedDataParallel) -> dict[str, Tensor]:
    found = model.module.named_parameters()
    return {name: p for name, p in found if p.requires_grad and name not in model.parameters_to_ignore}
