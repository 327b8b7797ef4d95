"""What a run is and what its steps work on, for the bubble profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from lightning_freescale._lightning.loops import LightningModule, Trainer
from lightning_freescale.balance import CostModel, MicroBatches
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.profiling.reporting.facts import RunInfo

Floats = NDArray[np.float64]
_FITTED = 20_000
"""Rank-steps that a fit rests on at most, the last ones; it takes a fraction of a second."""


def describe_run(trainer: Trainer, module: LightningModule, label: str | None) -> RunInfo:
    """Return what is run, to tell whether two reports compare; ``label`` is the strategy's name if not given."""
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
    )


def _parameters(trainer: Trainer, module: LightningModule) -> int:
    """How many; tables whole, of which a rank holds a part, so that a run compares with one under another strategy."""
    tables: Any = getattr(trainer.strategy, "tables", None)
    if tables is None:
        return sum(parameter.numel() for parameter in module.parameters())
    shards = {id(parameter) for _, sharded in tables.modules for parameter in sharded.parameters()}
    dense = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in shards)
    return dense + sum(table.rows * table.dim for table in tables.tables)


def work_of_step(
    trainer: Trainer, batch: Any, index: int, lengths_fn: Callable[[Any], Any] | None = None
) -> tuple[int, Floats | None, float | None]:
    """Return a step's number of samples, the sums of :func:`sample_features` over them, and what its plan says it costs.

    0 samples, and None for the others, are unknown. ``lengths_fn`` gives the history lengths of a batch's samples, if the user
    knows better than the loader.
    """
    parts = batch.batches if isinstance(batch, MicroBatches) else (batch,)
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    count, features, planned = _planned_work(trainer, sampler, index) if hasattr(sampler, "counts") else (None, None, None)
    if lengths_fn is not None:
        lengths = np.concatenate([np.asarray(lengths_fn(part), dtype=np.float64) for part in parts])
        return len(lengths), sample_features(lengths).sum(axis=0), planned
    return sum(samples_in(part) for part in parts) if count is None else count, features, planned


def _planned_work(trainer: Trainer, sampler: Any, index: int) -> tuple[int, Floats, float]:
    if callable(sampler.costs):  # a stream
        count, cost = sampler.counts(index)[sampler.rank], sampler.costs(index)[sampler.rank]
        return count, np.array([count, cost, 0.0, 0.0]), float(cost)
    mine = sampler.plan(sampler.epoch, index)[sampler.rank]
    cost = float(sampler.costs[mine].sum())
    train = getattr(getattr(trainer, "datamodule", None), "train", None)
    if not isinstance(train, MapStyleData) or train.lengths is None:
        return len(mine), np.array([len(mine), cost, 0.0, 0.0]), cost
    speeds = sampler.options.get("rank_speeds")
    planned = (cost + train.base_in(sampler.epoch)) / (1.0 if speeds is None else speeds[sampler.rank])
    return len(mine), train.features(mine).sum(axis=0), planned


def samples_in(batch: Any) -> int:
    """Return the common first dimension of all tensors of a batch, jagged ones counted by their samples; 0 if there is none."""
    leaves = pytree.tree_leaves(batch, is_leaf=_is_jagged)
    sizes = {leaf.stride() for leaf in leaves if _is_jagged(leaf)}
    sizes |= {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def fit_costs(features: Floats, compute: Floats) -> tuple[Floats, Floats] | None:
    """Fit costs to compute times, see :data:`~lightning_freescale.profiling.collection.history.FitCosts`.

    None if there are fewer than ten rank-steps, or some without compute.
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
