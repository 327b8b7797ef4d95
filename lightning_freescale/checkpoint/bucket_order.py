"""The order in which dense gradients come, by which DDP lays out its buckets after its first step.

Over three or more ranks, how an element's sum is rounded depends on where it stands in its bucket. A run that resumes has a new
DDP, and so has to lay the buckets out as the run before did, ahead of its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def noting_order(model: nn.Module | None, order: list[str]) -> Iterator[None]:
    """Enter this around a backward: ``order`` gets the names of what DDP reduces, in the order in which gradients come.

    It stays as it is if it holds names, if nothing is reduced, and where DDP never changes its buckets.
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
    """Have DDP lay its buckets out for gradients that come in this order; returns whether it did. Collective.

    It reduces zeros once. Not if the module has other parameters than the run had, whose buckets are others in any case.
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
