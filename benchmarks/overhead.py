"""Overhead of strategy "freescale" without any bubble to remove, against a hand-written TorchRec + DDP loop.

All variants train the reference model on the same batches, on two gloo ranks, in alternating rounds of one run: by hand,
freescale without overlap, freescale (these two change places in each round), by hand. The figure of a round is its median step.
The overhead is freescale over the mean of the two runs by hand, and the floor is one of these over the other. Both are medians
over the rounds. Other load on the machine affects the wall time. It hardly affects the CPU time of the process, which counts
the work that the strategy adds. A rank has one core here, which compute fills, so the work of the engine's thread is not
hidden, as it is beside a device.

Histories have one length, or differ. In the second case the samples of a step are assigned so that both ranks finish together.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import harness
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from demo import COLUMNS, RATINGS, quiet
from hstu import CollateWithNegatives, HSTURecommender
from torch import nn
from torch.utils.data import DataLoader
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.balance import CostModel, assign
from lightning_freescale.data import Histories, HistoryDataset, read_interactions
from lightning_freescale.testing import run_distributed

ITEMS, RANKS, WARMUP = 10_000, 2, 3
COST = CostModel(constant=47_000, linear=610, quadratic=1)  # of the reference model, measured on a CPU core
TRAIN_TAKES_OFF = 3  # two items are held out, and the last remaining one has no next
LENGTHS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "equal": lambda draw, count: np.full(count, 200),
    "short": lambda draw, count: draw.integers(3, 51, count),
    "heavy-tail": lambda draw, count: np.clip(draw.lognormal(4, 1.2, count), 3, 2000).astype(int),
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="histories per rank and step")
    parser.add_argument("--histories", choices=[*LENGTHS, "movielens"], default="equal")
    options = parser.parse_args()
    rounds = np.array(run_distributed(_rounds, RANKS, options, timeout=1200)[0])  # [rounds, variants, wall and CPU]
    figures = {}
    for clock, (by_hand, plain, overlapped, again) in zip(("wall", "cpu"), rounds.transpose(2, 1, 0)):
        step, floor = float(np.median(by_hand) * 1e3), float(np.median(np.abs(again / by_hand - 1)))
        figures |= {f"{clock}_step_ms": step, f"{clock}_floor": floor}
        print(f"{clock}: step by hand {step:.1f} ms; floor {floor:.1%}")
        for name, times in (("without_overlap", plain), ("with_overlap", overlapped)):
            low, middle, high = np.quantile(times / (by_hand + again) * 2 - 1, [0.25, 0.5, 0.75])
            figures |= {
                f"{clock}_{name}": float(middle),
                f"{clock}_{name}_low": float(low),
                f"{clock}_{name}_high": float(high),
            }
            label = name.replace("_", " ")
            print(f"  freescale {label} {middle:+.1%} (half of the rounds within {low:+.1%} to {high:+.1%})")
        low, middle, high = np.quantile(overlapped / plain - 1, [0.25, 0.5, 0.75])
        figures |= {f"{clock}_overlap": float(middle), f"{clock}_overlap_low": float(low), f"{clock}_overlap_high": float(high)}
        print(f"  with overlap over without {middle:+.1%} (half of the rounds within {low:+.1%} to {high:+.1%})")
    harness.finish(figures, options)


def _rounds(options: Any) -> list[tuple[Any, ...]]:
    quiet()
    items, batches = _batches(options)
    rounds = []
    for number in range(options.rounds):
        first = _by_hand(items, batches)
        order = (False, True) if number % 2 == 0 else (True, False)
        times = {overlap: _with_freescale(items, batches, overlap) for overlap in order}
        rounds.append((first, times[False], times[True], _by_hand(items, batches)))
    return rounds


def _batches(options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of items, and this rank's batches."""
    draw, steps = np.random.default_rng(0), options.steps + WARMUP
    samples = steps * RANKS * options.samples
    if options.histories == "movielens":
        histories = read_interactions(RATINGS, **COLUMNS)
    else:
        histories = _draw_histories(draw, LENGTHS[options.histories](draw, samples))
    dataset = HistoryDataset(histories, np.arange(len(histories.lengths)), "train")
    collate, batches = CollateWithNegatives(histories.num_items), []
    for users in np.resize(draw.permutation(len(dataset)), (steps, RANKS * options.samples)):
        mine = users[assign(COST(dataset.lengths[users]), RANKS).rank_of_sample == dist.get_rank()]
        batches.append(collate([dataset[user] for user in mine]))
    return histories.num_items, batches


def _draw_histories(draw: np.random.Generator, lengths: Any) -> Histories:
    """Draw histories whose training samples have these lengths; few items are popular."""
    offsets = np.append(0, np.cumsum(lengths + TRAIN_TAKES_OFF))
    items = (ITEMS * draw.random(offsets[-1]) ** 3).astype(int)
    return Histories(items, np.arange(offsets[-1]) * 3600, offsets, np.arange(len(lengths)), np.arange(ITEMS))


class _Step(nn.Module):
    """The module that DDP wraps by hand: one training step, without logging."""

    def __init__(self, model: HSTURecommender) -> None:
        super().__init__()
        self.model = model
        model.log = lambda *args, **kwargs: None

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model.training_step(batch, 0)


def _by_hand(items: int, batches: list[Any]) -> list[float]:
    torch.manual_seed(0)
    step, sharder = _Step(HSTURecommender(items)), EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        step.model.items,
        {"item": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        step,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"model.items": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    dense = torch.optim.AdamW([p for name, p in model.named_parameters() if ".items." not in name], lr=2e-3)
    ends = []
    for batch in batches:
        dense.zero_grad()
        model(batch).backward()
        dense.step()
        ends.append(_now())
    return _median_step(ends)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _median_step(ends: list[tuple[float, float]]) -> list[float]:
    return np.median(np.diff(ends, axis=0)[WARMUP - 1 :], axis=0).tolist()


class _Times(L.Callback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(_now())


def _with_freescale(items: int, batches: list[Any], overlap: bool) -> list[float]:
    torch.manual_seed(0)
    times = _Times()
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(overlap=overlap or "torchrec"),
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    trainer.fit(HSTURecommender(items), DataLoader(batches, batch_size=None))
    return _median_step(times.ends)


if __name__ == "__main__":
    main()
