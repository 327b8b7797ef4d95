"""The state of a run besides parameters and optimizer: accumulated gradients, random states and DDP's bucket order."""

from __future__ import annotations

import random
import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_freescale._runtime.object_gather import gather_objects, gather_on_first_rank

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine


def gather_accumulated(
    wait: bool, module: nn.Module, sharded: Container[str], engine: OverlapEngine | None
) -> list[dict[str, Any]]:
    """Return the accumulated gradients of every rank on rank 0; an empty list if there are none. Collective.

    ``wait`` tells whether this rank has accumulated gradients. The ``sharded`` parameters have none; the drained engine has
    those of the tables.
    """
    if not any(gather_objects(wait)):
        return []
    named = ((name, p.grad) for name, p in module.named_parameters() if name not in sharded)
    dense = {name: grad.detach().cpu() for name, grad in named if grad is not None}
    return gather_on_first_rank({"dense": dense, "tables": {} if engine is None else engine.accumulated_gradients()})


def restore_accumulated(
    ranks: list[dict[str, Any]], module: nn.Module, sharded: Container[str], wrapped: nn.Module, engine: OverlapEngine | None
) -> None:
    """Restore this rank's part of a result of :func:`gather_accumulated`, before the first step."""
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"the checkpoint was written between two optimizer steps and has the accumulated gradients of {len(ranks)} ranks, "
            f"but this run has {dist.get_world_size()} ranks. Resume on {len(ranks)} ranks, or from a checkpoint that was "
            "written after an optimizer step."
        )
    mine = ranks[dist.get_rank()]
    dense = {name: parameter for name, parameter in module.named_parameters() if name not in sharded}
    there = {*dense, *(() if engine is None else engine.collections)}
    if missing := [name for name in (*mine["dense"], *mine["tables"]) if name not in there]:
        raise ValueError(
            f"the checkpoint was written between two optimizer steps and has accumulated gradients of {missing}. This run has "
            "no parameters or overlapped collections with these names. Resume with the same module, shard= and overlap=, or "
            "from a checkpoint that was written after an optimizer step."
        )
    used = [dense[name] for name in mine["dense"] if dense[name].requires_grad]
    if used and isinstance(wrapped, DistributedDataParallel) and wrapped.find_unused_parameters:
        # DDP records in backward which parameters a window uses. It would not reduce the gradient of a parameter that was used
        # only before the checkpoint
        with wrapped.no_sync():
            torch.autograd.backward([p.view_as(p) for p in used], [torch.zeros_like(p) for p in used])
    for name, gradient in mine["dense"].items():
        dense[name].grad = gradient.to(dense[name].device)
    if engine is not None:
        engine.restore_accumulated(mine["tables"])


@contextmanager
def refusing_another_optimizer(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Raise a ValueError if loading in the block removes options from the optimizers' groups.

    torch's ``load_state_dict`` accepts the groups of another optimizer, and the next step would raise a KeyError.
    """
    options = [[[name for name in each.defaults if name in group] for group in each.param_groups] for each in optimizers]
    yield
    for optimizer, of_groups in zip(optimizers, options):
        for group, names in zip(optimizer.param_groups, of_groups):
            if missing := [name for name in names if name not in group]:
                raise ValueError(
                    f"the checkpoint is of another optimizer than {type(optimizer).__name__}: its parameter groups have the "
                    f"options {', '.join(name for name in group if name != 'params')}, but not {', '.join(missing)}. Resume "
                    "with the optimizer that wrote it, or load only the weights with model.load_state_dict"
                )


def gather_random_states(device: torch.device, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return the random states of torch, ``device``, NumPy and Python by rank. Collective, by default on the default group."""
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = numpy_state
    mine = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    return gather_objects(mine, group)


def set_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """Set this rank's random states; warn and change nothing if the world size differs."""
    if len(states) != dist.get_world_size():
        warnings.warn(
            f"the checkpoint has the random states of {len(states)} ranks, but this run has {dist.get_world_size()} ranks. "
            "Dropout and other random draws continue from the seed of this run.",
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
# DDP arranges its buckets after its first step, in the order in which gradients arrive. On three or more ranks, the rounding of
# an element's sum depends on its place in its bucket. A resumed run has a new DDP, which must arrange its buckets like the
# earlier run before its first step.


@contextmanager
def noting_order(model: nn.Module | None, order: list[str]) -> Iterator[None]:
    """Append the names of DDP's parameters to ``order``, in the order of their gradients, during a backward.

    ``order`` does not change if it is not empty, if DDP does not reduce, or if DDP never changes its buckets.
    """
    if order or not isinstance(model, DistributedDataParallel) or not _changes_buckets(model):
        yield
        return
    came: list[str] = []
    reduced = _reduced(model)
    with ExitStack() as hooks:
        for name, parameter in reduced.items():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name)))
        yield
    if len(came) == len(reduced):
        order += came


def lay_out_buckets(model: nn.Module | None, order: Sequence[str]) -> bool:
    """Make DDP arrange its buckets for this order of gradients; return whether it did. Collective.

    DDP reduces zeros once. Nothing happens if ``order`` does not have the names of the module's parameters.
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
    # DDP learns a static graph in the first step, and a communication hook may keep a state between calls
    return model.require_backward_grad_sync and not (model.find_unused_parameters or model.static_graph or model._comm_hooks)


def _reduced(model: DistributedDataParallel) -> dict[str, Tensor]:
    found = model.module.named_parameters()
    return {name: p for name, p in found if p.requires_grad and name not in model.parameters_to_ignore}
