"""Checks that refuse a run which could not be trained exactly, before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import (
    GradientAccumulationScheduler,
    MixedPrecision,
    StochasticWeightAveraging,
    Trainer,
    pruned_modules,
    rank_zero_warn,
)
from lightning_freescale._lightning.weight_averaging import averaging_callbacks
from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.balance import BalancedSampler

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection

_MOST_DIMS = 16
_BECAUSE = "strategy 'freescale' updates the embedding tables during backward"


def refuse_run(
    trainer: Trainer, found: list[tuple[Collection, Any]], plain: Sequence[Collection], device: torch.device, fitting: bool
) -> None:
    """Raise a ValueError if a run with the collections ``found`` would not be exact, before anything is changed."""
    from lightning_freescale.embeddings.id_checks import check_num_embeddings
    from lightning_freescale.embeddings.managed_collision import refuse_device

    check_num_embeddings([each for each, _ in found], getattr(getattr(trainer, "datamodule", None), "feature_rows", {}))
    managed = {each.path: held for each, held in found if each.managed}
    for path, held in managed.items():
        refuse_device(path, held, device, fitting)
    if not fitting:
        return
    refuse_unsupported(trainer)
    pruned = pruned_modules(trainer)
    if unfit := [each.path for each, held in found if not pruned.isdisjoint(held.modules())]:
        raise ValueError(
            f"ModelPruning prunes the tables of collections {unfit}, but each rank would prune its part by itself. Pass "
            "ModelPruning(parameters_to_prune=[(module, 'weight'), ...]) with other modules, or use strategy='ddp'"
        )
    if managed:
        reason = "managed collisions give its rows to other ids during training. Use a plain collection"
        refuse_averages(trainer, dict.fromkeys(managed, reason))
    if plain:
        refuse_accumulation(trainer, plain)


def refuse_unsupported(trainer: Trainer) -> None:
    """Raise a ValueError if the module or the Trainer uses something that sharded tables do not support."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"automatic_optimization=False: {_BECAUSE} and cannot know when a manual step follows. Use automatic optimization, "
            "or strategy='ddp'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the unsharded module, but the embedding tables are sharded. Use "
                "WeightAveraging, remove the callback, or use strategy='ddp'"
            )
    plugin = trainer.precision_plugin
    if plugin.precision not in ("32-true", "bf16-mixed") or (isinstance(plugin, MixedPrecision) and plugin.scaler):
        raise ValueError(
            f"Trainer(precision={plugin.precision!r}): other precisions scale or convert the gradients of embedding tables. "
            "Pass '32-true' or 'bf16-mixed'"
        )


def refuse_averages(trainer: Trainer, unfit: Mapping[str, str]) -> None:
    """Raise a ValueError if a callback averages the weights of the collections ``unfit``: paths with the reasons."""
    for callback in averaging_callbacks(trainer) if unfit else ():
        path, reason = next(iter(unfit.items()))
        raise ValueError(
            f"{type(callback).__name__} cannot average the weights of collection {path!r}: {reason}, or remove the callback"
        )


def refuse_several_optimizers(error: RuntimeError, module: Any) -> None:
    """Replace Lightning's ``error`` about several optimizers by a ValueError with the fix."""
    if module.automatic_optimization and str(error).startswith("Training with multiple optimizers"):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returns several optimizers. Return one optimizer with a parameter "
            "group for each set of parameters; their options may differ. For tables that need another kind of optimizer, call "
            "torchrec.optim.apply_optimizer_in_backward in __init__"
        ) from error


def refuse_options(checkpoint: str, target: Any) -> None:
    """Raise a ValueError for an invalid ``checkpoint`` or ``target_bubble_reduction``."""
    if checkpoint not in ("single", "sharded", "async"):
        raise ValueError(f"FreeScaleStrategy(checkpoint={checkpoint!r}): pass 'single', 'sharded' or 'async'")
    if target is not None and not 0 < target <= 1:
        raise ValueError(
            f"FreeScaleStrategy(target_bubble_reduction={target!r}): pass the share of the bubble to remove, above 0 and at "
            "most 1, such as 0.9, or None"
        )


def refuse_unequal_parameters(model: Any) -> None:
    """Raise a ValueError on every rank if hooks have given the dense parameters of the ranks other values. Collective."""
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size() == 1:
        return
    dense = {name: each for name, each in model.module.named_parameters() if name not in model.parameters_to_ignore}
    # sums of bytes are exact in any order
    sums = [weight.detach().contiguous().view(-1).view(torch.uint8).sum() for weight in dense.values()]
    of_ranks = gather_objects(torch.stack(sums).tolist() if sums else [])
    if unequal := [name for name, *found in zip(dense, *of_ranks) if len(set(found)) > 1]:
        raise ValueError(
            f"the ranks start with different values of {unequal}. Ranks draw different random numbers after set-up. Initialise "
            "weights in __init__ instead of on_fit_start or on_train_start"
        )


def refuse_unequal_shapes(tensor: Tensor, group: Any) -> None:
    """Raise a ValueError on every rank if the ranks pass tensors of different shapes to all_gather. Collective.

    Without this check, gloo ends the process.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    mine = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())], device=tensor.device)
    shapes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shapes, mine, group=group)
    found = [tuple(each[1 : 1 + each[0]]) for each in torch.stack(shapes).tolist()]
    if len(set(found)) > 1:
        raise ValueError(
            f"all_gather of tensors of shapes {found} by rank: all shapes must be the same. Ranks have different numbers of "
            "samples in the last step of an epoch and in the last batch of an evaluation, and with BalanceOptions("
            "assignment_mode='slack' or 'free') in every step. Pass drop_last=True and assignment_mode='fixed', or pad the "
            "tensors"
        )


def refuse_sampler(sampler: Any, world_size: int) -> None:
    """Raise a ValueError if the sampler plans for another number of ranks."""
    if isinstance(sampler, BalancedSampler) and sampler.num_replicas != world_size:
        raise ValueError(
            f"the loader's BalancedSampler has num_replicas={sampler.num_replicas}, but the Trainer has {world_size} ranks. "
            "Pass the data module itself, trainer.fit(model, datamodule=data), or create the sampler with "
            f"num_replicas={world_size}"
        )


def refuse_second_backward(update_due: bool) -> None:
    """Raise a ValueError if the gradients of the previous backward still wait for an optimizer step."""
    if update_due:
        raise ValueError(
            f"backward was called twice without an optimizer step: {_BECAUSE}, so gradients cannot be accumulated. Call "
            "optimizer.step(closure) for every batch, also in an overridden optimizer_step"
        )


def refuse_accumulation(trainer: Trainer, plain: Sequence[Collection], micro_batches: bool = False) -> None:
    """Raise a ValueError if gradients accumulate while TorchRec updates the collections ``plain`` during backward.

    Call it also during training, because a callback may change the Trainer's setting.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [type(each).__name__ for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    cause, fix = "", "accumulate_grad_batches=1 and a larger batch_size"
    if micro_batches:
        cause, fix = "FreeScaleDataModule(micro_batches=...)", "micro_batches=1"
    elif schedules:
        cause = schedules[0]
    elif trainer.accumulate_grad_batches != 1:
        cause = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
    if cause:
        raise ValueError(
            f"{cause}: collections {[each.path for each in plain]} are updated during backward, so their gradients cannot be "
            "accumulated. Accumulation needs an overlapped exchange: FreeScaleStrategy(overlap=True) and tables that are "
            f"sharded by rows or whole. Otherwise use {fix}"
        )


def warn_of_few_samples(loader: Any) -> None:
    """Warn that a step of a torch ``DataLoader`` has fewer samples than its ``batch_size``."""
    sampler, asked = getattr(loader, "sampler", None), getattr(loader, "batch_size", None)
    if asked and isinstance(sampler, Sized) and len(sampler) < asked:
        rank_zero_warn(f"DataLoader(batch_size={asked}) is above the samples of each rank, {len(sampler)}. Pass a smaller one")


def warn_of_loader(loader: Any) -> None:
    """Warn that the exchange is not overlapped because the strategy did not wrap the training loader."""
    why = (
        "the training loader was created before the module had its embedding collections (read "
        "trainer.estimated_stepping_batches in configure_optimizers, or create the collections in __init__)"
    )
    if isinstance(loader, (dict, list, tuple)):
        kind = type(loader).__name__
        why = f"the training batches come out of a {kind} of loaders, whose next batch is not known (use one DataLoader)"
    rank_zero_warn(f"{why}: the embedding exchange is not overlapped with compute")
