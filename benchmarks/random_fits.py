"""Fits of a random case with each compared strategy, and the differences between them."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from random_batches import loader
from random_cases import Case
from random_model import Model
from torch import Tensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.overlap import hot_route, hot_rows
from lightning_freescale.embeddings.overlap.hot_rows import HotList, LinkCosts
from lightning_freescale.embeddings.plain_embedding import as_collection


@dataclass
class Outcome:
    """The result of a fit on one rank: its error, or losses, predictions by batch and, whole on rank 0, weights."""

    error: str = ""
    steps: int = 0
    losses: tuple[float, ...] = ()
    weights: dict[str, Tensor] | None = None
    random_state: Tensor | None = None
    predictions: tuple[tuple[float, ...], ...] = ()
    hot: bool = False  # whether rows have taken two hops


def run_case(case: Case) -> dict[str, Outcome]:
    """Train with each compared strategy on the ranks of ``run_distributed``."""
    plain = [f"parts.{index}" for index, part in enumerate(case.parts) if part.plain]
    options: dict[str, Any] = {"find_unused_parameters": True, "shard": plain or None, "split_backward": case.split_backward}
    options["plan"] = _plan(case)
    if case.nodes > 1:
        rank, each = int(os.environ["RANK"]), case.ranks // case.nodes
        os.environ.update(LOCAL_RANK=str(rank % each), GROUP_RANK=str(rank // each), LOCAL_WORLD_SIZE=str(each))
        options |= {"hot_rows": case.hot_rows} | ({"rerank_every_n_steps": 2} if case.hot_rows else {})
        with _rows_soon_hot(), _lists_that_differ() if case.lists_differ else nullcontext():
            return {
                "ddp": _fit(case, DDPStrategy(find_unused_parameters=True)),
                "hot rows": _fit(case, FreeScaleStrategy(**options)),
            }
    further = {"dedup": False} if case.further_way == "dedup=False" else {"overlap": False, "split_backward": False}
    return {
        "ddp": _fit(case, DDPStrategy(find_unused_parameters=True)),
        "freescale": _fit(case, FreeScaleStrategy(**options)),
        case.further_way: _fit(case, FreeScaleStrategy(**options | further)),
    }


@contextmanager
def _rows_soon_hot() -> Iterator[None]:
    """Let ``hot_rows="auto"`` choose rows in a few steps on one machine, whose links all cost the same."""
    costs = LinkCosts(near_s_per_byte=1e-9, far_s_per_byte=1e-8, near_latency_s=0.0)
    with patch.object(hot_route, "measure_links", lambda *_: costs), patch.object(hot_rows, "_FEWEST_EXTRA", 0):
        yield


@contextmanager
def _lists_that_differ() -> Iterator[None]:
    """Use other lists of hot rows on each rank and for each message."""
    rank, calls = int(os.environ["RANK"]), itertools.count()

    def contain(hot_list: HotList, keys: Tensor) -> Tensor:
        return (keys * 7 + 3 * rank + next(calls)) % 3 < 2

    with patch.object(HotList, "begun", True), patch.object(HotList, "contain", contain):
        yield


def _plan(case: Case) -> ShardingPlan | None:
    if not any(part.sharding for part in case.parts):
        return None
    model, plan = Model(case, lazy=False), {}
    for index, (part, module) in enumerate(zip(case.parts, model.parts)):
        path, tables = f"parts.{index}", {}
        whole: Any = as_collection(path, part.rows[0], part.dim) if part.plain else module
        configs = whole.embedding_bag_configs() if part.bags else whole.embedding_configs()
        for table, config in enumerate(configs):
            kind, count = case.shards(part, table)
            owners = [(case.seed + table + shard) % case.ranks for shard in range(count)]
            where = {"row_wise": {}, "table_wise": {"rank": owners[0]}, "column_wise": {"ranks": owners}}[kind]
            tables[config.name] = getattr(sharding_plan, kind)(**where, compute_kernel="fused")
        each = case.ranks // case.nodes
        plan[path] = sharding_plan.construct_module_sharding_plan(whole, tables, None, each, case.ranks, "cpu")
    return ShardingPlan(plan)


def _fit(case: Case, strategy: Any) -> Outcome:
    rank, module = int(os.environ["RANK"]), Model(case, lazy=not isinstance(strategy, FreeScaleStrategy))
    clip = {"none": {}, "norm": {"gradient_clip_val": 0.1}}.get(
        case.clip, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.ranks // case.nodes,
        num_nodes=case.nodes,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.window,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **clip,
    )
    parts = case.micro_batches if isinstance(strategy, FreeScaleStrategy) else 1
    salts = {"fit": 5, "validate": 6, "predict": 7}
    data = {stage: loader(case, rank, salt, batches=case.evaluation_batches(stage, rank)) for stage, salt in salts.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader(case, rank, micro_batches=parts), data["fit"] if case.validates else None)
            weights = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
            heat = getattr(getattr(strategy, "overlap_report", None), "heat", None)
            if case.evaluates:
                trainer.validate(module, data["validate"], verbose=False)
                trainer.predict(module, data["predict"], return_predictions=False)
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}", steps=len(module.losses))
    predictions = tuple(map(tuple, module.predictions))
    hot = heat is not None and heat.hot_near_bytes > 0
    return Outcome("", len(module.losses), tuple(module.losses), weights, torch.get_rng_state(), predictions, hot)


def defects(ranks: list[dict[str, Outcome]], tolerance: float = 1e-4) -> list[str]:
    """Return the differences from ``"ddp"``; a refusal before the first step is none.

    Args:
        ranks: results of :func:`run_case` on each rank.
        tolerance: of losses, and of weights relative to the largest of a tensor.
    """
    found = []
    for name in [name for name in ranks[0] if name != "ddp"]:
        for rank, outcomes in enumerate(ranks):
            theirs, mine = outcomes["ddp"], outcomes[name]
            if theirs.error or (mine.error and not mine.steps):
                continue
            if mine.error:
                found.append(f"{name}, rank {rank}: {mine.error[:300]}")
                continue
            if (worst := _largest_difference(theirs.losses, mine.losses)) > tolerance:
                found.append(f"{name}, rank {rank}: losses differ by {worst:.1e}")
            for batch, (expected, predicted) in enumerate(zip_longest(theirs.predictions, mine.predictions, fillvalue=())):
                if (worst := _largest_difference(expected, predicted)) > tolerance:
                    found.append(f"{name}, rank {rank}: predictions of batch {batch} differ by {worst:.1e}")
            if not torch.equal(theirs.random_state, mine.random_state):
                found.append(f"{name}, rank {rank}: random numbers differ")
            if not rank:
                found += [f"{name}: {text}" for text in _different(theirs.weights or {}, mine.weights or {}, tolerance)]
    return found


def _largest_difference(theirs: Sequence[float], mine: Sequence[float]) -> float:
    """Return the largest relative difference; infinite if a number is missing or NaN."""
    off = [abs(a - b) / max(abs(a), 1e-2) for a, b in zip_longest(theirs, mine, fillvalue=math.nan)]
    return max((math.inf if math.isnan(each) else each for each in off), default=0.0)


def _different(theirs: dict[str, Tensor], mine: dict[str, Tensor], tolerance: float) -> list[str]:
    if theirs.keys() != mine.keys():
        return [f"names differ: {sorted(theirs.keys() ^ mine.keys())}"]
    off = {key: float((mine[key] - value).abs().max() / value.abs().max().clamp(min=1e-2)) for key, value in theirs.items()}
    return [f"{key} differs by {amount:.1e}" for key, amount in off.items() if not amount <= tolerance]
