"""Describe a run and the work of its steps to the bubble profiler."""

from __future__ import annotations

import reprlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import astuple, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler

from lightning_freescale._lightning.loops import LightningModule, Trainer
from lightning_freescale.balance import BalancedSampler, CostModel, MicroBatches
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.simulate import summarize_lengths
from lightning_freescale.data.map_style import MapStyleData, map_style_data
from lightning_freescale.profiling.analysis.imbalance import PlannedStep
from lightning_freescale.profiling.reporting.document import RunInfo

Floats = NDArray[np.float64]
_FITTED = 20_000
"""The largest number of rank-steps in a fit, which then takes a fraction of a second. The last ones are used."""


def describe_run(trainer: Trainer, module: LightningModule, label: str | None, **own_options: Any) -> RunInfo:
    """Return the description of a run for its report; the default label is the strategy's name."""
    strategy = getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__)
    device = trainer.strategy.root_device
    return RunInfo(
        label=label or strategy,
        model=type(module).__name__,
        parameters=_parameters(trainer, module),
        strategy=strategy,
        world_size=trainer.world_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        num_workers=getattr(trainer.train_dataloader, "num_workers", None),
        sharded_tables=_has_sharded_tables(trainer, module),
        **settings_of(trainer, **own_options),
    )


def settings_of(trainer: Trainer, **own_options: Any) -> dict[str, Any]:
    """Return the fields of :class:`RunInfo` that training may change; ``own_options`` are those of the profiler."""
    strategy: Any = trainer.strategy
    autopilot, train = getattr(strategy, "autopilot", None), map_style_data(trainer)
    rejected = {} if autopilot is None else autopilot.rejected
    options = {name: getattr(strategy, name, None) for name in ("split_backward", "target_bubble_reduction", "wire")}
    options |= {"micro_batches": _micro_batches(trainer), **own_options}
    if "split_backward" in rejected:  # of two values
        options["split_backward"] = rejected["split_backward"] == [False]
    if train is not None:
        if train.keeps_equal_counts:
            rejected["assignment_mode"] = ["slack"]
        options["lengths"] = own_options.get("lengths") or train.lengths is not None
        options["batch_tokens"] = None if train.budget is None else train.budget.per_rank
        if train.calibrates and trainer.world_size > 1 and getattr(strategy, "weighs_loss", False):
            options["cost"] = "auto"
    in_force = {name: value for name, value in options.items() if value and value != "float32"}
    return {"assignment": _assignment(trainer), "overlap": _overlap(strategy), "options": in_force, "rejected": rejected}


def workload_of(trainer: Trainer, module: LightningModule, seen: Iterable[Floats], overlap: Any) -> dict[str, Any]:
    """Return ``workload`` of the report of a run that ends.

    ``seen`` is filled by :func:`work_of_step` on this rank, which is rank 0. ``overlap`` is the report of the overlap; None if
    nothing was overlapped.
    """
    lengths, train = [*seen], map_style_data(trainer)
    if train is not None and train.lengths is not None:
        longest = min((each.max() for each in lengths), default=np.inf)  # of steps in which the run cut samples
        lengths = [np.minimum(train.lengths, train.padded_length or longest)]
    elif hasattr(getattr(trainer.train_dataloader, "sampler", None), "counts"):
        lengths = []  # for the same reason, those of rank 0 are not like the others
    in_parts = trainer.accumulate_grad_batches > 1 or _micro_batches(trainer) is not None
    return {
        "lengths": summarize_lengths(np.concatenate(lengths)) if lengths else None,
        "tables": _table_sizes(trainer, module),
        # only the first part collides, but the rows of all parts count
        "collision_rate": None if overlap is None or in_parts else overlap.collision_rate,
        "lookups": None if overlap is None else overlap.tokens * trainer.world_size,
    }


def _table_sizes(trainer: Trainer, module: LightningModule) -> dict[str, int] | None:
    """Return the sizes of the tables of this package's strategy, or of the largest embedding modules if nothing is sharded."""
    sharded, gradients = getattr(trainer.strategy, "tables", None), 0
    if sharded is not None:
        sizes = [(table.rows, table.dim * table.dtype.itemsize, 0) for table in sharded.tables]
    elif _has_sharded_tables(trainer, module):
        return None
    else:
        embeddings = [each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
        weights = [*dict.fromkeys(each.weight for each in embeddings)]  # tied weights count once
        large = max((weight.nbytes for weight in weights), default=0) / 10  # leave out positions and categories
        weights = [weight for weight in weights if weight.nbytes >= large > 0]
        sizes = [(len(each), each.nbytes // len(each), each.nbytes * each.requires_grad) for each in weights]
        gradients = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    names = ("rows", "row_bytes", "reduced_bytes", "gradient_bytes")
    return dict(zip(names, [*map(sum, zip(*sizes)), gradients])) if sizes else None


def _micro_batches(trainer: Trainer) -> str | int | None:
    schedule = getattr(getattr(trainer.train_dataloader, "sampler", None), "micro_batches", None)
    if schedule is None or schedule.candidates == [1]:
        return None
    return "auto" if schedule.auto else int(schedule.candidates[0])


def _assignment(trainer: Trainer) -> str | None:
    """Return how the current plan assigns samples to the ranks; None if unknown."""
    sampler, data = getattr(trainer.train_dataloader, "sampler", None), getattr(trainer, "datamodule", None)
    planned = getattr(getattr(data, "train", None), "assignment_mode", None)
    if not isinstance(sampler, BalancedSampler):
        return planned  # of a stream
    if not sampler.balance_steps:
        return "as drawn"
    return str(sampler.options.get("assignment_mode", "fixed")) if planned is None else planned


def _overlap(strategy: Any) -> str | None:
    if getattr(strategy, "tables", None) is None:
        return None
    if not strategy.overlap:
        return "off"
    return "impossible" if strategy.engine is None else "on"


def _has_sharded_tables(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether this package's strategy shards tables, or the module contains modules that the user sharded."""
    if getattr(trainer.strategy, "tables", None) is not None:
        return True
    torchrec = sys.modules.get("torchrec.distributed.types")  # without the import nothing is sharded
    return torchrec is not None and any(isinstance(each, torchrec.ShardedModule) for each in module.modules())


def _parameters(trainer: Trainer, module: LightningModule) -> int:
    """Return the number of parameters of the unsharded module, so that runs with different strategies are comparable."""
    tables: Any = getattr(trainer.strategy, "tables", None)
    if tables is None:
        return sum(parameter.numel() for parameter in module.parameters())
    with tables.shown_whole(module):
        return sum(parameter.numel() for parameter in module.parameters())


def work_of_step(
    trainer: Trainer, batch: Any, index: int, lengths_fn: Callable[[Any], Any] | None = None, seen: deque[Floats] | None = None
) -> tuple[int, Floats | None, float | None]:
    """Return a step's number of samples, the sums of :func:`sample_features` over the samples, and the planned cost.

    Unknown values are 0 samples and None. Lengths of the user's ``lengths_fn`` take precedence over those of the loader. They
    are added to ``seen`` if the loader has none, or longer ones.
    """
    parts = batch.batches if isinstance(batch, MicroBatches) else (batch,)
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    count, features, planned = _planned_work(trainer, sampler, index) if hasattr(sampler, "counts") else (None, None, None)
    if lengths_fn is not None:
        lengths = np.concatenate([_lengths_of(lengths_fn(part)) for part in parts])
        if seen is not None and _shows_lengths(trainer, sampler, index, lengths):
            seen.append(lengths)
        return len(lengths), sample_features(lengths).sum(axis=0), planned
    if count is None:
        count = _drawn(trainer.train_dataloader, index)
    if count is None:
        most = getattr(trainer.train_dataloader, "batch_size", None)
        count = sum(samples_in(part, most) for part in parts)
    return count, features, planned


def _shows_lengths(trainer: Trainer, sampler: Any, index: int, lengths: Floats) -> bool:
    """Return whether the lengths are unknown without the step, or the step has cut its longest sample."""
    train = map_style_data(trainer)
    if train is None or train.lengths is None:
        return True
    if not hasattr(sampler, "plan"):
        return False
    mine = sampler.plan(sampler.epoch, index)[sampler.rank]
    return bool(train.lengths[mine].max(initial=0) > 1.05 * lengths.max())  # held-out items shorten histories, too


def _lengths_of(returned: Any) -> Floats:
    wrong = ""
    try:
        lengths = np.asarray(returned, dtype=np.float64)  # numpy refuses tensors on other devices, whose reading would wait
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"a tensor on {returned.device}" if isinstance(returned, torch.Tensor) else reprlib.repr(returned)
        wrong = f"{shown}, which numpy cannot convert ({error})"
    else:
        invalid = ~(np.isfinite(lengths) & (lengths >= 0))
        if lengths.ndim != 1 or not lengths.size:
            wrong = f"{reprlib.repr(returned)} of shape {lengths.shape}"
        elif invalid.any():
            wrong = f"{reprlib.repr(returned)}, which contains {lengths[invalid][0]}"
    if wrong:
        raise ValueError(
            f"BubbleProfiler(lengths_fn=...): the function returned {wrong}. Return the history length of every sample of the "
            "batch: finite numbers >= 0 in a list, an array or a tensor on the CPU"
        )
    return lengths


def _planned_work(trainer: Trainer, sampler: Any, index: int) -> tuple[int, Floats, float]:
    if callable(sampler.costs):  # a stream
        count, cost = sampler.counts(index)[sampler.rank], sampler.costs(index)[sampler.rank]
        return count, np.array([count, cost, 0.0, 0.0]), float(cost)
    mine = sampler.plan(sampler.epoch, index)[sampler.rank]
    cost = float(sampler.costs[mine].sum())
    train = map_style_data(trainer)
    if train is None or train.lengths is None:
        return len(mine), np.array([len(mine), cost, 0.0, 0.0]), cost
    *features, cost = sampler.load(
        sampler.epoch, index, lambda samples: np.column_stack([train.features(samples), sampler.costs[samples]])
    )
    return len(mine), np.array(features), cost + train.base_in(sampler.epoch)


def plan_of_step(trainer: Trainer, index: int) -> PlannedStep | None:
    """Return the planned balance of a step on rank 0; None on the other ranks, and for a loader without a plan."""
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    if not trainer.is_global_zero or not hasattr(sampler, "balance"):
        return None
    found, base, fitted = sampler.balance(index), 0.0, False
    train = map_style_data(trainer)
    if train is not None:
        base = train.base_in(sampler.epoch)
        since = [refit.model for epoch, refit in sorted(train.refits.items()) if epoch <= sampler.epoch]
        fitted = base > 0 or (bool(since) and since[-1] != CostModel())
    if base:
        found = found.with_base(base, sampler.num_replicas)
    balanced = getattr(sampler, "balance_steps", True)
    padded, padding = (None, None) if train is None else _padding(train, sampler, index, found.padding)
    return PlannedStep(
        unbalanced=found.unbalanced,
        balanced=found.balanced if balanced else None,
        lower_bound=found.lower_bound,
        tokens_unbalanced=found.tokens_unbalanced,
        tokens_balanced=found.tokens_imbalance if balanced else None,
        tokens_fullest=found.tokens_fullest,
        fitted=fitted,
        padding=padding,
        padded=padded,
    )


def _padding(train: MapStyleData, sampler: Any, index: int, planned: float | None) -> tuple[str | None, float | None]:
    """Return the kind of padding of a step's batches, and the share of the computed tokens that is padding; None if unknown.

    Without a plan for padding, micro-batches count on this rank only.
    """
    if train.lengths is None or train.padding not in ("batch", "fixed"):
        return None, None
    if train.padding == "batch" and planned is not None:
        return "batch, planned", planned
    if train.padding == "fixed" and train.padded_length is None:
        return None, None
    batch = sampler.batch_of_rank(sampler.epoch, index)
    parts = batch.batches if isinstance(batch, MicroBatches) else sampler.plan(sampler.epoch, index)
    lengths = [np.minimum(train.lengths[np.array(part)], train.padded_length or np.inf) for part in parts if len(part)]
    computed = sum(len(each) * (train.padded_length or each.max()) for each in lengths)
    return train.padding, float(1 - sum(each.sum() for each in lengths) / computed) if computed else 0.0


def _drawn(loader: Any, index: int) -> int | None:
    """Return the number of samples that torch's own batch sampler draws for a batch; None for other samplers and streams."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
        return None
    try:
        left = len(batches.sampler) - index * batches.batch_size
    except (TypeError, NotImplementedError):  # a sampler without a valid length
        return None
    return min(batches.batch_size, left) if left > 0 else None


def samples_in(batch: Any, most: int | None = None) -> int:
    """Return the number of samples of a batch; 0 if unknown.

    This is the common first dimension of all tensors in lists, dicts and dataclasses. Jagged tensors count by their samples. A
    list whose length is ``most``, the loader's batch size, counts as a list of samples.
    """
    sizes = set(_sizes(batch))
    common = sizes.pop() if len(sizes) == 1 else 0
    return most if most is not None and isinstance(batch, (list, tuple)) and len(batch) == most != common else common


def _sizes(batch: Any) -> Iterator[int]:
    for leaf in pytree.tree_leaves(batch, is_leaf=lambda value: _is_jagged(value) or _is_record(value)):
        if isinstance(leaf, torch.Tensor):
            yield from (leaf.size(0),) if leaf.is_nested else leaf.shape[:1]
        elif _is_jagged(leaf):
            yield leaf.stride()
        elif _is_record(leaf):
            yield from _sizes([getattr(leaf, field.name, None) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from _sizes(dict(leaf))


def fit_costs(features: Floats, compute: Floats) -> tuple[Floats, Floats] | None:
    """Fit costs to compute times, see :data:`~lightning_freescale.profiling.collection.history.FitCosts`.

    Return None for fewer than ten rank-steps, or if a rank-step has no compute.
    """
    steps, ranks = compute.shape
    if steps * ranks < 10 or not (compute > 0).all():
        return None
    fitted = slice(-max(1, _FITTED // ranks), None)
    sums, seconds = features[fitted].reshape(-1, features.shape[-1]), compute[fitted].ravel()
    fit = CostModel.fit(sums, seconds, np.tile(np.arange(ranks), len(seconds) // ranks))
    return fit.base + features @ np.array(astuple(fit.model)), fit.slowness


def _is_jagged(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and callable(getattr(value, "stride", None))


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
