"""Refuses what cannot be trained exactly, before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._lightning.loops import (
    GradientAccumulationScheduler,
    MixedPrecision,
    StochasticWeightAveraging,
    Trainer,
    rank_zero_warn,
)
from lightning_freescale._lightning.weight_averaging import averaging_callbacks
from lightning_freescale.balance import BalancedSampler

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection

_MOST_DIMS = 16
_BECAUSE = "strategy 'freescale' updates the embedding tables during backward"


def refuse_run(
    trainer: Trainer, found: list[tuple[Collection, Any]], device: torch.device, fitting: bool, by_torchrec: bool
) -> None:
    """Check that a run with these collections will be exact, before anything is changed.

    Raises:
        ValueError: the data has more ids than a table has rows, a collection does not work on ``device``, or a fit asks for
            what does not go with tables that are updated during backward.
    """
    from lightning_freescale.embeddings.id_checks import check_num_embeddings
    from lightning_freescale.embeddings.managed_collision import refuse_device

    needed = getattr(getattr(trainer, "datamodule", None), "feature_rows", {})
    check_num_embeddings([collection for collection, _ in found], needed)
    for collection, held in found:
        if collection.managed:
            refuse_device(collection.path, held, device, fitting)
    if fitting:
        _refuse_unsupported(trainer)
        reason = "managed collisions give its rows to other ids during training. Use a plain collection"
        refuse_averages(trainer, {collection.path: reason for collection, _ in found if collection.managed})
        refuse_accumulation(trainer, [c for c, _ in found if by_torchrec or c.managed])


def _refuse_unsupported(trainer: Trainer) -> None:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"automatic_optimization=False: {_BECAUSE} and cannot tell when a manual step is due. Use automatic optimization, "
            "or strategy='ddp'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the unsharded module, but the embedding tables are sharded. Take "
                "WeightAveraging, remove it, or use strategy='ddp'"
            )
    plugin = trainer.precision_plugin
    if plugin.precision not in ("32-true", "bf16-mixed") or (isinstance(plugin, MixedPrecision) and plugin.scaler):
        raise ValueError(
            f"Trainer(precision={plugin.precision!r}): the tables take part in '32-true' and 'bf16-mixed' only, other "
            "precisions scale or convert what they are updated with. Use one of those two"
        )


def refuse_averages(trainer: Trainer, unfit: Mapping[str, str]) -> None:
    """Refuse to average the weights of the collections ``unfit``, given with the reasons by path, by a ValueError."""
    for callback in averaging_callbacks(trainer) if unfit else ():
        path, reason = next(iter(unfit.items()))
        raise ValueError(
            f"{type(callback).__name__} cannot average the weights of collection {path!r}: {reason}, or remove the callback"
        )


def refuse_several_optimizers(error: RuntimeError, module: Any) -> None:
    """Say in place of Lightning's ``error`` what configure_optimizers may return instead of several optimizers."""
    if module.automatic_optimization and str(error).startswith("Training with multiple optimizers"):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returns several optimizers. Return one, with a parameter group for "
            "each set of parameters (their options may differ), and give tables that need another kind of optimizer theirs in "
            "__init__ by torchrec.optim.apply_optimizer_in_backward"
        ) from error


def named_for_freescale(text: Any) -> Any:
    """Return what Lightning's DDPStrategy tells the user to write, with the names of this strategy."""
    if not isinstance(text, str):
        return text
    return text.replace("'ddp_find_unused_parameters", "'freescale_find_unused_parameters").replace(
        "DDPStrategy(find_unused", "FreeScaleStrategy(find_unused"
    )


def refuse_target(target: Any) -> None:
    """Refuse a ``target_bubble_reduction`` that is no share, by a ValueError."""
    if target is not None and not 0 < target <= 1:
        raise ValueError(
            f"FreeScaleStrategy(target_bubble_reduction={target!r}): pass the share of the bubble that is to go, above 0 and "
            "at most 1, such as 0.9, or None"
        )


def refuse_checkpoint(checkpoint: str) -> None:
    """Raise a ValueError for an unknown ``checkpoint``."""
    if checkpoint not in ("single", "sharded", "async"):
        raise ValueError(f"FreeScaleStrategy(checkpoint={checkpoint!r}): pass 'single', 'sharded' or 'async'")


def refuse_unequal_shapes(tensor: Tensor, group: Any) -> None:
    """Refuse to gather tensors of different shapes, by a ValueError on every rank; gloo would end the process. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    mine = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())], device=tensor.device)
    shapes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shapes, mine, group=group)
    found = [tuple(each[1 : 1 + each[0]]) for each in torch.stack(shapes).tolist()]
    if len(set(found)) > 1:
        raise ValueError(
            f"all_gather of tensors of shapes {found} by rank: they must be the same. Ranks have different numbers of samples "
            "in the last step of an epoch and in the last batch of an evaluation, and with BalanceOptions(assignment_mode="
            "'slack' or 'free') in every step: pass drop_last=True and assignment_mode='fixed', or pad the tensors"
        )


def refuse_sampler(sampler: Any, world_size: int) -> None:
    """Refuse a sampler that plans for another number of ranks, by a ValueError."""
    if isinstance(sampler, BalancedSampler) and sampler.num_replicas != world_size:
        raise ValueError(
            f"the loader's BalancedSampler plans for num_replicas={sampler.num_replicas}, the Trainer has {world_size} ranks: "
            "pass the data module itself, trainer.fit(model, datamodule=data), or make the sampler with "
            f"num_replicas={world_size}"
        )


def refuse_second_backward(update_due: bool) -> None:
    """Refuse a backward while the gradients of the last one wait for an optimizer step, by a ValueError."""
    if update_due:
        raise ValueError(
            f"a second backward without an optimizer step between (an own optimizer_step that skips some?): {_BECAUSE}, so "
            "gradients cannot be accumulated. Call optimizer.step(closure) for every batch"
        )


def refuse_accumulation(trainer: Trainer, plain: Sequence[Collection], micro_batches: bool = False) -> None:
    """Refuse accumulated gradients, where TorchRec updates the collections ``plain`` during backward.

    Call it during training as well, where a callback may change the Trainer's.
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
    if plain and cause:
        paths = [collection.path for collection in plain]
        raise ValueError(
            f"{cause}: collections {paths} are updated during backward, so their gradients cannot be accumulated; only those "
            "can whose exchange is overlapped (FreeScaleStrategy(overlap=True), tables sharded by rows or whole). "
            f"Use {fix}"
        )


def warn_of_loader(loader: Any) -> None:
    """Warn that a training loader is none that looks ahead, and why."""
    why = (
        "the training loader was made before the module had its embedding collections (read "
        "trainer.estimated_stepping_batches in configure_optimizers, or make them in __init__)"
    )
    if isinstance(loader, (dict, list, tuple)):
        kind = type(loader).__name__
        why = f"the training batches come from a {kind} of loaders, whose next batch is not known (use one DataLoader)"
    rank_zero_warn(f"{why}: the embedding exchange is not overlapped with compute")
