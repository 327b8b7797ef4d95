"""What strategy "freescale" costs where there is no bubble to remove, against a hand-written TorchRec + DDP loop.

All train the reference model on the same batches of equal lengths, on two gloo ranks, in alternating rounds of one run: by
hand, freescale without overlap, freescale, by hand. A round's figure is its median step; the overhead is freescale over the
mean of the two by hand, the floor one of these over the other, both as medians over the rounds. Wall time carries the
machine's other load; CPU time of the process hardly does, and counts what the strategy adds. A rank has one core here, which
its own compute fills: what the overlap engine's thread does is not hidden, as it is beside a device.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import harness
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from hstu import HSTURecommender, item_ids
from torch import nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed

ITEMS, LENGTH, RANKS, WARMUP = 10_000, 200, 2, 3
NEGATIVES = 512


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="histories per rank and step")
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
    harness.finish(figures, options)


def _rounds(options: Any) -> list[tuple[Any, ...]]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        __import__("logging").getLogger(name).setLevel("ERROR")
    batches = [_batch(step, options.samples) for step in range(options.steps + WARMUP)]
    ways = (_by_hand, partial(_with_freescale, overlap=False), partial(_with_freescale, overlap=True), _by_hand)
    return [tuple(way(batches) for way in ways) for _ in range(options.rounds)]


def _batch(step: int, samples: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
    items = torch.randint(0, ITEMS, (samples * LENGTH,), generator=draw)
    lengths = torch.full((samples,), LENGTH, dtype=torch.int32)
    times = torch.arange(LENGTH).repeat(samples) * 3600
    features = KeyedJaggedTensor(keys=["item"], values=items, lengths=lengths)
    target, negative = items.roll(-1), torch.randint(0, ITEMS, (NEGATIVES,), generator=draw)
    return {"features": features, "time": times, "target": target, "ids": item_ids(items, lengths, target, negative)}


class _Step(nn.Module):
    """What DDP wraps by hand: one training step, without logging."""

    def __init__(self, model: HSTURecommender) -> None:
        super().__init__()
        self.model = model
        model.log = lambda *args, **kwargs: None

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model.training_step(batch, 0)


def _by_hand(batches: list[Any]) -> list[float]:
    torch.manual_seed(0)
    step, sharder = _Step(HSTURecommender(ITEMS)), EmbeddingCollectionSharder()
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
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(_now())


def _with_freescale(batches: list[Any], overlap: bool) -> list[float]:
    torch.manual_seed(0)
    times = _Times()
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(overlap=overlap),
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
    trainer.fit(HSTURecommender(ITEMS), DataLoader(batches, batch_size=None))
    return _median_step(times.ends)


if __name__ == "__main__":
    main()
