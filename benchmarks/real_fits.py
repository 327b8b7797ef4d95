"""Fits with real compute that ``real_compute.py`` compares: data, models, Lightning's Trainer and TorchRec's pipeline."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).resolve().parent)]

import hstu
import lengths
import lightning as L
import numpy as np
import overlap_variants
import overlap_wire
import overlap_workload
import peers
import sasrec
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.profiling.analysis.breakdown import COMPUTE
from lightning_freescale.training import setup

RUNGS: dict[str, dict[str, Any]] = {
    "floor": {"overlap": "torchrec"},
    "floor-drawn": {"overlap": "torchrec"},
    "ddp": {},
    "plain": {"overlap": "torchrec"},
    "pipeline": {},
    "plain-once": {"overlap": "torchrec"},
    "verl": {"overlap": "torchrec"},
    "nvidia": {"overlap": "torchrec"},
    "grouped": {"overlap": "torchrec"},
    "balance": {"overlap": "torchrec"},
    "overlap": {"dedup": False},
    "dedup": {},
    "split": {"split_backward": True},
}
"""The options of the strategy for each rung."""
OURS = ("balance", "overlap", "dedup", "split")
"""These rungs and the floor have our plan. The others have samples as drawn, or the plan that they are named after."""
SKIPPED = 8
"""Steps at the beginning of a fit: pipelines fill, DDP orders its buckets, and padded batches are detected.

The last step, which has no lookahead, does not count either.
"""
DIM, NEGATIVES, ADAGRAD = 64, 512, {"lr": 0.01}


# -- data


class Histories(Dataset[dict[str, Any]]):
    """Histories with the lengths of a data set and Zipf-distributed items, drawn from their index."""

    def __init__(self, options: Any) -> None:
        random = np.random.default_rng(overlap_workload.SEED)
        _, known = lengths.read_lengths(options.data or overlap_workload.RATINGS)
        samples = total_steps(options) * options.batch * int(os.environ["WORLD_SIZE"])
        # the last item is only a target
        self.lengths = (np.minimum(random.choice(known, samples), options.max_length + 1) - 1).clip(min=1).astype(np.int64)
        popularity = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -overlap_workload.EXPONENT)
        drawn = random.random(int(self.lengths.sum()) + samples) * popularity[-1]
        items = random.permutation(options.rows)[np.searchsorted(popularity, drawn)]
        self._items = np.split(items, np.cumsum(self.lengths + 1)[:-1])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        items = self._items[index]
        return {"item": items[:-1], "target": items[1:], "time": np.arange(len(items) - 1) * 3600, "user": index}


def total_steps(options: Any) -> int:
    """Return the steps of a fit, including those that do not count."""
    return int(SKIPPED + options.steps + 1)


def batches_of(name: str, data: Histories, options: Any, seed: int) -> list[list[NDArray[np.int64]]]:
    """Return the samples of each rank (inner list) in each step, for a rung without our plan."""
    world, steps = dist.get_world_size(), total_steps(options)
    drawn = FreeScaleDataModule(data, data.lengths, options.batch, cost=cost(options), balance=False, seed=seed)
    sampler = drawn.train.sampler(0, world)
    plans = [sampler.plan(0, step) for step in range(steps)]
    if name == "grouped":
        # group_by_length of Hugging Face sorts the samples of many steps. The steps that count keep their samples together
        counted = np.concatenate([np.concatenate(plan) for plan in plans[SKIPPED:-1]])
        by_length = counted[np.argsort(data.lengths[counted], kind="stable")].reshape(options.steps, options.batch, world)
        plans[SKIPPED:-1] = [list(step.T) for step in np.random.default_rng(seed).permutation(by_length)]
    if name in ("verl", "nvidia"):
        divide = peers.load_peers(options.peers)[name]
        for step, plan in enumerate(plans):
            samples = np.concatenate(plan)
            whole = [[int(each) for each in values[samples]] for values in (data.lengths, cost(options)(data.lengths))]
            plans[step] = [samples[list(part)] for part in divide(*whole, world)]
    return plans


# -- models


def counters() -> tuple[float, float, float]:
    """Return the seconds of wall time and of this process's processor time, and the bytes that this host has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return time.perf_counter(), time.process_time(), float(sum(int(line.partition(":")[2].split()[8]) for line in lines))


class Timed(L.LightningModule):
    """Records the counters at the start of each step."""

    began: list[tuple[float, float, float]]

    def on_train_start(self) -> None:
        """Begin."""
        self.began = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the start of a step."""
        self.began.append(counters())

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing."""


class HSTU(Timed, hstu.HSTURecommender):
    """The reference HSTU."""

    def rows(self, found: Any, batch: Any) -> Any:
        """Return what a lookup of the batch returns, from the rows that were looked up."""
        return found

    @staticmethod
    def ids(batch: Any) -> KeyedJaggedTensor:
        """Return the ids of all lookups."""
        ids: KeyedJaggedTensor = batch["ids"]
        return ids


class WholeHSTU(HSTU):
    """The reference HSTU with one optimizer for all parameters. An optimizer in backward would not reduce the gradients."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with patch.object(hstu, "apply_optimizer_in_backward"):
            super().__init__(*arguments, **named)


class PaddedSASRec(Timed, sasrec.SASRec):
    """SASRec on padded batches, with Adagrad, because FBGEMM has no Adam for CPUs."""

    def rows(self, found: Any, batch: Any) -> Tensor:
        """Return what a lookup of the batch returns, from the rows that were looked up."""
        rows: Tensor = found["item"].values()
        return rows.view(*batch["ids"].shape, -1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters."""
        return torch.optim.Adagrad(self.parameters(), **ADAGRAD)

    @staticmethod
    def ids(batch: Any) -> KeyedJaggedTensor:
        """Return the ids of all lookups."""
        values = batch["ids"].flatten()
        return KeyedJaggedTensor(["item"], values, lengths=torch.tensor([len(values)]).int())


class OnceEach(nn.Module):
    """Looks up each id of a batch once, as a user can add to a model."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table, self.embedding_dim = table, DIM

    def forward(self, ids: Any) -> Any:
        """Return what the table returns."""
        if isinstance(ids, Tensor):
            once, place = torch.unique(ids, return_inverse=True)
            return self.table(once)[place]
        once, place = torch.unique(ids.values(), return_inverse=True)
        keys, none = ids.keys(), [0] * (len(ids.keys()) - 1)
        found = self.table(KeyedJaggedTensor(keys, once, lengths=torch.tensor([len(once), *none]).int()))
        rows = found[keys[0]].values()[place].split(ids.length_per_key())
        return {key: JaggedTensor(part, lengths=ids[key].lengths()) for key, part in zip(keys, rows)}


def new_model(name: str, options: Any) -> Any:
    torch.manual_seed(0)
    if options.model == "sasrec":
        model: Any = PaddedSASRec(options.rows, options.max_length, DIM, options.layers, dropout=0.0)
    else:
        model = (WholeHSTU if name == "ddp" else HSTU)(options.rows, DIM, options.layers, dropout=0.0)
    if name == "plain-once":
        model.items = OnceEach(model.items)
    return model


def collate_of(options: Any) -> Any:
    if options.model == "sasrec":
        return partial(sasrec.collate, num_items=options.rows)
    return hstu.CollateWithNegatives(options.rows, NEGATIVES)


def cost(options: Any) -> CostModel:
    """Return the multiply-adds of the model."""
    return CostModel.from_config(DIM, options.layers, feedforward=DIM if options.model == "sasrec" else 0)


# -- fits


@dataclass(frozen=True)
class Fit:
    """Wall and processor seconds and sent bytes of each counted step on this rank, shape ``[steps, 3]``.

    Rank 0 also has shares of all ranks' time and a typical step, except of a pipeline.
    """

    counted: NDArray[np.float64]
    shares: dict[str, float]
    step: list[list[Any]]


def fit(name: str, data: Histories, options: Any, seed: int) -> Fit:
    """Train the model anew, as a rung does. Collective."""
    if name == "pipeline":
        return _fit_pipeline(data, options, seed)
    model, steps, skipped = new_model(name, options), total_steps(options), SKIPPED
    if name == "ddp":
        skipped = SKIPPED // 4  # its steps take long, and no pipeline fills
        steps = skipped + options.ddp_steps + 1
    shard = ["items.table" if name == "plain-once" else "items"] if options.model == "sasrec" else None
    strategy: Any = "ddp" if name == "ddp" else FreeScaleStrategy(shard=shard, **RUNGS[name])
    profiler = BubbleProfiler(mkdtemp(), verbose=False)
    profiler.options = replace(profiler.options, warmup_steps=skipped)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_steps=steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[profiler], limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    with _own_tables() if name.startswith("floor") else nullcontext():
        if name in ("floor", *OURS):
            trainer.fit(model, FreeScaleDataModule(
                data, data.lengths, options.batch, cost=cost(options), collate_fn=collate_of(options), seed=seed,
                loss_reduction="target_mean",
            ))  # fmt: skip
        else:
            trainer.fit(model, _loader(name, data, options, seed))
    counted = np.diff([*model.began, counters()], axis=0)[skipped:-1]
    report = profiler.report
    traced = report.median_step["ranks"] if report is not None and report.median_step else []
    return Fit(counted, {} if report is None else dict(report.shares), [timeline(rank) for rank in traced])


def timeline(intervals: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the parts of a rank's step from 1 ms as kind, start and end in ms; neighbours of one kind are one part."""
    parts: list[Any] = []
    for kind, _, start, end in intervals:
        kind = "compute" if kind in COMPUTE else kind
        if end - start < 1e-3:
            continue
        if parts and parts[-1][0] == kind:
            parts[-1][2] = round(1e3 * end)
        else:
            parts.append([kind, round(1e3 * start), round(1e3 * end)])
    return parts


def _loader(name: str, data: Histories, options: Any, seed: int) -> DataLoader[Any]:
    mine = [[int(each) for each in plan[dist.get_rank()]] for plan in batches_of(name, data, options, seed)]
    return DataLoader(data, batch_sampler=mine, collate_fn=collate_of(options))


@contextmanager
def _own_tables() -> Iterator[None]:
    """Make each rank keep the whole table to itself: TorchRec's lookups and updates without an exchange."""
    shard, planned, alone = TableSharding.shard, TableSharding._plan, dist.new_subgroups(1)[0]

    def without_others(self: TableSharding, *, group: Any, local_world_size: int, **others: Any) -> Any:
        return shard(self, group=alone, local_world_size=1, **others)

    def here(self: TableSharding, *arguments: Any) -> Any:
        plan = planned(self, *arguments)
        for how in (how for tables in plan.plan.values() for how in tables.values()):
            for part in how.sharding_spec.shards:
                part.placement = _remote_device(f"rank:{dist.get_rank()}/cpu")  # planners number the ranks of the group
        return plan

    with patch.multiple(TableSharding, shard=without_others, _plan=here):
        yield


# -- TorchRec's pipeline


@dataclass
class Batch(Pipelineable):
    """A batch whose ids TorchRec's pipeline finds by tracing."""

    features: KeyedJaggedTensor
    content: Any

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch, which is on the CPU already."""
        return self

    def record_stream(self, stream: object) -> None:
        """Do nothing, because the CPU has no streams."""


class _Given(nn.Module):
    """Replaces the table in the rest of a model, and returns the rows that the pipeline has looked up."""

    rows: Any = None
    embedding_dim = DIM

    def forward(self, ids: Any) -> Any:
        return self.rows


class _Rest(nn.Module):
    """A model without its table. The pipeline does not trace it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.items = _Given()

    def forward(self, found: Any, content: Any) -> Tensor:
        self.model.items.rows = self.model.rows(found, content)
        loss: Tensor = self.model.training_step(content, 0)
        return loss


class Traceable(nn.Module):
    """A model in the form that TorchRec's pipeline traces: the lookup, then the rest."""

    def __init__(self, model: Any, options: Any) -> None:
        super().__init__()
        if isinstance(model, HSTU):
            self.items = model.items  # with its optimizer
        else:
            self.items = EmbeddingCollection(tables=[EmbeddingConfig(options.rows + 1, DIM, "item", feature_names=["item"])])
            apply_optimizer_in_backward(torch.optim.Adagrad, self.items.parameters(), dict(ADAGRAD))
        self.dense = _Rest(model)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss twice, because the pipeline expects a loss and a result."""
        loss = self.dense(self.items(batch.features), batch.content)
        return loss, loss


def _fit_pipeline(data: Histories, options: Any, seed: int) -> Fit:
    model = new_model("pipeline", options)
    traceable = Traceable(model, options)
    # the buckets of the other rungs, so that the reduction of dense gradients does not differ
    strategy: Any = SimpleNamespace(ddp_options={}, num_nodes=dist.get_world_size())
    wrapped = overlap_variants.with_torchrec(traceable, **setup._bucket_size([*model.parameters()], strategy))
    optimizer = model.configure_optimizers()  # of the dense part, which is all that the model still has
    pipeline: Any = TrainPipelineSparseDist(wrapped, optimizer, torch.device("cpu"))
    batches, marks = _traceable(model, _loader("pipeline", data, options, seed)), []
    with overlap_wire.Wire().patched():  # receives are posted first, as in the other rungs
        for _ in range(total_steps(options)):
            marks.append(counters())
            pipeline.progress(batches)
    return Fit(np.diff([*marks, counters()], axis=0)[SKIPPED:-1], {}, [])


def _traceable(model: Any, loader: DataLoader[Any]) -> Iterator[Batch]:
    return (Batch(model.ids(content), content) for content in loader)
