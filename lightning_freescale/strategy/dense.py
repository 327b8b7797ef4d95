"""The part of a module that is not sharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel


def materialize(module: nn.Module, device: torch.device, leave: Collection[nn.Module]) -> None:
    """Give parameters and buffers on the meta device memory on ``device``, and initialise them by ``reset_parameters``.

    The submodules in ``leave`` stay as they are.

    Raises:
        ValueError: a submodule on the meta device has no ``reset_parameters``.
    """
    for path, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if child in leave or not any(tensor.is_meta for tensor in own):
            continue
        if not callable(getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"module {path!r} ({type(child).__name__}) is on the meta device and has no reset_parameters() to initialise "
                "it: add that method, or build it on the CPU"
            )
        child.to_empty(device=device, recurse=False)
        child.reset_parameters()


def wrap_dense(module: nn.Module, sharded: Collection[str], device_ids: list[int] | None, options: dict[str, Any]) -> nn.Module:
    """Wrap ``module`` into DistributedDataParallel on the default group, leaving out the parameters named ``sharded``.

    A module whose only trainable parameters are sharded is returned as it is.
    """
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in sharded):
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(sharded))
    return DistributedDataParallel(module, device_ids=device_ids, **options)


def sync_dense(module: nn.Module, sharded: Collection[str]) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks, where no DistributedDataParallel does it. Collective."""
    group = dist.group.WORLD
    assert group is not None
    _sync_module_states(module, group, 250 * 1024 * 1024, 0, set(sharded))
