"""Refuses what cannot be trained exactly, before training starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import (
    GradientAccumulationScheduler,
    MixedPrecision,
    StochasticWeightAveraging,
    Trainer,
)
from lightning_freescale._lightning.weight_averaging import averaging_callbacks
from lightning_freescale.balance import BalancedSampler

_MOST_DIMS = 16
_BECAUSE = "strategy 'freescale' updates the embedding tables during backward"


def refuse_unsupported(trainer: Trainer) -> None:
    """Refuse a fit of a module with embedding collections that would not be exact.

    Raises:
        ValueError: a Trainer argument or a feature of the module does not go with fused updates; names it and the fix.
    """
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


def refuse_options(start_method: str, model_averaging_period: int | None) -> None:
    """Refuse options of DDPStrategy that do not go with sharded tables, by a ValueError."""
    if start_method != "popen":
        raise ValueError(
            f"FreeScaleStrategy(start_method={start_method!r}) would bring shards back to the main process, which cannot hold "
            "them. Leave start_method out and run a script, or use torchrun"
        )
    if model_averaging_period is not None:
        raise ValueError(
            f"FreeScaleStrategy(model_averaging_period={model_averaging_period!r}): local SGD lets dense parameters differ "
            "between ranks, which sharded tables cannot. Remove it"
        )


def refuse_unknown_options(given: Iterable[str], strategy: type) -> None:
    """Refuse what neither ``strategy``, nor a class it is built on, nor DistributedDataParallel takes.

    Raises:
        TypeError: names the option and the one that is spelled most like it.
    """
    takers = [vars(each)["__init__"] for each in strategy.__mro__[:-1] if "__init__" in vars(each)]
    names = {name for taker in (*takers, DistributedDataParallel) for name in signature(taker).parameters}
    names -= {"self", "ddp_options", "kwargs", "module", "device_ids"}
    for option in given:
        if option not in names:
            near = get_close_matches(option, names, n=1)
            meant = f"did you mean {near[0]}=?" if near else "see its docstring and DistributedDataParallel's"
            raise TypeError(f"FreeScaleStrategy({option}=...): there is no such option, {meant}")


def no_overlap_because(overlap: bool, exchange: str) -> str:
    """Return the option with which no exchange is hidden behind compute; empty if there is none."""
    if exchange == "torchrec":
        return "FreeScaleStrategy(exchange='torchrec') hides no exchange"
    return "" if overlap else "FreeScaleStrategy(overlap=False) hides no exchange"


def refuse_ids_of(ids_of: Any, no_overlap: str) -> None:
    """Refuse an ``ids_of`` that would have no effect, by a ValueError, or that is no function, by a TypeError."""
    if ids_of is not None and not callable(ids_of):
        raise TypeError(f"FreeScaleStrategy(ids_of={ids_of!r}): pass a function of the batch that returns a KeyedJaggedTensor")
    if no_overlap and ids_of is not None:
        raise ValueError(f"FreeScaleStrategy(ids_of=...): {no_overlap}, so the next ids have no use. Leave one of the two out")


def refuse_split_backward(split_backward: bool, no_overlap: str) -> None:
    """Refuse a ``split_backward`` that would have no effect, by a ValueError."""
    if split_backward and no_overlap:
        raise ValueError(
            f"FreeScaleStrategy(split_backward={split_backward!r}): {no_overlap}, so nothing travels while backward computes "
            "the gradients of the weights. Leave one of the two out"
        )


def refuse_target(target: Any) -> None:
    """Refuse a ``target_bubble_reduction`` that is no share, by a ValueError."""
    if target is not None and not 0 < target <= 1:
        raise ValueError(
            f"FreeScaleStrategy(target_bubble_reduction={target!r}): pass the share of the bubble that is to go, above 0 and "
            "at most 1, such as 0.9, or None"
        )


def refuse_shard(shard: Any) -> None:
    """Refuse anything but ``"auto"``, None or paths, by a TypeError."""
    if shard is None or shard == "auto":
        return
    if isinstance(shard, str) or not isinstance(shard, Sequence) or not all(isinstance(path, str) for path in shard):
        example = f"[{shard!r}]" if isinstance(shard, str) else "['item_emb']"
        raise TypeError(f"FreeScaleStrategy(shard={shard!r}): pass a list of paths, such as {example}, or 'auto'")


def has_embedding_ids(module: Any) -> bool:
    """Whether the LightningModule has a method that tells the ids in a batch; an attribute of that name is none."""
    return callable(getattr(type(module), "embedding_ids", None))


def refuse_shared_gpu(error: RuntimeError) -> None:
    """Say what to do where NCCL has failed because several ranks run on one GPU.

    Raises:
        RuntimeError: that is why.
    """
    if "Duplicate GPU detected" in str(error):
        raise RuntimeError(
            'several ranks run on one GPU, which NCCL refuses: FreeScaleStrategy(process_group_backend="gloo"), or a GPU for '
            "each rank"
        ) from error


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


def refuse_exchange(exchange: str, dedup: bool) -> None:
    """Refuse an ``exchange`` that there is not, or that would not be what another option asks for, by a ValueError."""
    if exchange not in ("flat", "two_level", "torchrec"):
        raise ValueError(f"FreeScaleStrategy(exchange={exchange!r}): pass 'flat', 'two_level' or 'torchrec'")
    if exchange == "two_level" and not dedup:
        raise ValueError(
            "FreeScaleStrategy(exchange='two_level', dedup=False): sums within a node first are not bitwise TorchRec's. Leave "
            "one of the two out"
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
    """Refuse a backward while the gradients of the last one wait for an optimizer step: somebody accumulates."""
    if update_due:
        raise ValueError(
            f"a second backward without an optimizer step between (an own optimizer_step that skips some?): {_BECAUSE}, so "
            "gradients cannot be accumulated. Call optimizer.step(closure) for every batch"
        )


def refuse_accumulation(trainer: Trainer, plain: Sequence[str], micro_batches: bool = False) -> None:
    """Refuse accumulated gradients, where TorchRec updates the collections ``plain`` during backward.

    Call it during training as well, where a callback may change the Trainer's.
    """
    cause, fix = accumulated_by(trainer), "accumulate_grad_batches=1 and a larger batch_size"
    if micro_batches:
        cause, fix = "FreeScaleDataModule(micro_batches=...)", "micro_batches=1"
    if not plain or not cause:
        return
    raise ValueError(
        f"{cause}: collections {list(plain)} are updated during backward, so their gradients cannot be accumulated; only those "
        "can whose exchange is overlapped (FreeScaleStrategy(overlap=True), tables sharded by rows or whole). "
        f"Use {fix}"
    )


def accumulated_by(trainer: Trainer) -> str:
    """Return what has gradients of several batches added up before an optimizer step; empty if nothing has."""
    schedules = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if schedules:
        return type(schedules[0]).__name__
    batches = trainer.accumulate_grad_batches
    return f"Trainer(accumulate_grad_batches={batches})" if batches != 1 else ""
