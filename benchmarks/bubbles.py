"""Accuracy of the bubble profiler: compute is a sleep, the network is shaped, and the correct parts are known.

``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/bubbles.py --data skewed --slow 1``

A plain LightningModule trains under ``strategy="ddp"``. It waits for data, computes forward (a sleep that follows from the
lengths of the samples), exchanges equal parts with all ranks, and computes backward. The expected parts of each step follow
from the sleeps and from the bytes on the wire. Two times are measured: that of messages without bytes, before the run, and the
true duration of each sleep, since a sleep is about a millisecond too long if there are more ranks than cores. The benchmark
prints the difference between report and expectation, as a share of the wall time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from harness import finish_on_all_ranks, parser
from netlab import link_rate
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_freescale import BubbleProfiler
from lightning_freescale.comm import BACKEND
from lightning_freescale.profiling.analysis.breakdown import PART_NAMES

BATCH = 4
DATA, HOST, BACKWARD = 0.010, 0.005, 0.5
"""Seconds of waiting for data and in a hook; compute of backward / compute of forward."""
BASE, PER_TOKEN = 0.060, 0.00004
"""Seconds of forward: per step, and per token."""
SLEPT = ("data_wait", "host_overhead", "forward", "backward")
Floats = NDArray[np.float64]


def main() -> None:
    """Run on all ranks."""
    options = _options()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lengths = _lengths(options.data, options.steps, world)
    slow = [1.3 if each == options.slow else 1.0 for each in range(world)]
    slept = np.zeros((options.steps, len(SLEPT)))
    model = Sleeper(options.kib * 1024, slow[rank], slept)
    folder = Path(mkdtemp(prefix="bubbles"))
    profiler = BubbleProfiler(folder, every_n_steps=10, lengths_fn=lambda batch: batch.tolist(), verbose=False)
    profiler.options = replace(profiler.options, warmup_steps=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy="ddp", accelerator="cpu", devices=1, num_nodes=world, max_epochs=1, callbacks=[profiler],
        use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Slow(lengths[:, rank], slept), batch_size=None))
    of_ranks: list[Any] = [None] * world
    dist.all_gather_object(of_ranks, slept)
    figures: dict[str, float] = {}
    if rank == 0:
        report = profiler.report
        assert report is not None
        rate = link_rate()
        wire = options.kib * 1024 / world * (world - 1) / rate
        print(f"transfer: {1e3 * wire:.1f} ms on the wire, {1e3 * model.small:.1f} ms for small messages")
        truth = np.stack([_truth(step, wire + model.small) for step in np.stack(of_ranks, axis=1)[report.steps]])
        figures = _compare(report, truth, options)
    finish_on_all_ranks(figures, options)


class Sleeper(L.LightningModule):
    """Computes by sleeping, and records the durations in ``slept``, shape ``[steps, SLEPT]``."""

    def __init__(self, size: int, slowness: float, slept: Floats) -> None:
        super().__init__()
        self.layer, self.slowness, self.slept = nn.Linear(4, 1), slowness, slept
        self.sent = torch.zeros(size // 4)

    def on_fit_start(self) -> None:
        """Create the process group of the exchange."""
        world = dist.get_world_size()
        self.group = dist.new_group(backend=BACKEND)
        self.sent = torch.zeros(len(self.sent) // world * world)
        self.small = self._small()

    def _small(self) -> float:
        """Return the seconds of the small messages that DDP and Lightning (for SIGTERM) send in a step."""
        message = torch.zeros(5)
        began = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(message)
            dist.broadcast(message[:1], 0)
        return (time.perf_counter() - began) / 20

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Sleep, as a slow hook does."""
        _sleep(HOST, self.slept[batch_idx], "host_overhead")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Compute, exchange, and return a loss whose backward computes."""
        seconds = self.slowness * _forward(batch.numpy())
        _sleep(seconds, self.slept[batch_idx], "forward")
        dist.all_to_all_single(torch.empty_like(self.sent), self.sent, group=self.group)
        return SleepBackward.apply(self.layer(torch.ones(4)).sum(), BACKWARD * seconds, self.slept[batch_idx])

    def configure_optimizers(self) -> Any:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


class SleepBackward(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, slept: Floats) -> Tensor:
        """Return the input."""
        ctx.seconds, ctx.slept = seconds, slept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sleep."""
        _sleep(ctx.seconds, ctx.slept, "backward")
        return gradient, None, None


class Slow(Dataset):
    """Batches of lengths that take a given time to read."""

    def __init__(self, lengths: np.ndarray, slept: Floats) -> None:
        self.lengths, self.slept = lengths, slept

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        _sleep(DATA, self.slept[index], "data_wait")
        return torch.tensor(self.lengths[index])


def _sleep(seconds: float, slept: Floats, part: str) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    slept[SLEPT.index(part)] = time.perf_counter() - began


def _forward(lengths: np.ndarray) -> float:
    return BASE + PER_TOKEN * float(lengths.sum())


def _lengths(kind: str, steps: int, world: int) -> np.ndarray:
    """Return the lengths of all samples, shape ``[steps, ranks, BATCH]``."""
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, (steps, world, BATCH))
    return np.full_like(drawn, 250.0) if kind == "equal" else drawn.clip(8, 2048)


def _truth(slept: Floats, transfer: float) -> Floats:
    """Return the parts of each rank's step if all ranks begin together, from ``[ranks, SLEPT]``; shape ``[ranks, parts]``."""
    data, host, forward, backward = slept.T
    before = data + host + forward
    parts: dict[str, Any] = dict(zip(SLEPT, slept.T))
    parts["straggler_wait"] = before.max() - before + backward.max() - backward
    parts |= {"transfer": transfer, "wall": before.max() + transfer + backward.max()}
    return np.stack([np.broadcast_to(parts.get(name, 0.0), (len(slept),)) for name in PART_NAMES], axis=-1)


def _compare(report: Any, truth: np.ndarray, options: Any) -> dict[str, float]:
    found, wall = report.breakdown, float(report.breakdown[..., 0].mean())
    # means over the run, as in a report; and the differences of single steps
    off = np.abs((found - truth).mean(axis=0)) / wall
    single = np.abs(found - truth)[..., 1:] / wall
    worst = off[:, 1:].max(axis=0)
    for name, share in zip(PART_NAMES[1:], worst):
        both = " / ".join(f"{1e3 * each[..., PART_NAMES.index(name)].mean():.1f}" for each in (truth, found))
        print(f"{name:>16}: injected / found {both} ms; largest difference of a rank: {share:.2%} of the wall time")
    print(f"{'wall':>16}: injected / found {1e3 * truth[..., 0].mean():.1f} / {1e3 * wall:.1f} ms")
    imbalance = report.imbalance
    print(f"single steps: 95 % within {np.quantile(single, 0.95):.2%}; {imbalance}")
    print(report)
    total = imbalance.data + imbalance.hardware + imbalance.jitter
    named = imbalance.slow
    return {
        "worst_part": float(off[:, 1:].max()),
        "not_summing": float(np.abs(found[..., 1:-1].sum(axis=-1) - found[..., 0]).max() / wall),
        "unexplained": float(found[..., PART_NAMES.index("unexplained")].mean() / wall),
        "data_share": imbalance.data / total,
        "hardware_share": imbalance.hardware / total,
        "named": float(list(named) == ([] if options.slow is None else [options.slow])),
        "overhead": report.overhead.total / wall,
    }


def _options() -> Any:
    options = parser(__doc__)
    options.add_argument("--data", choices=["equal", "skewed"], default="skewed", help="lengths of the samples")
    options.add_argument("--slow", type=int, help="the rank that takes 1.3 times as long")
    options.add_argument("--steps", type=int, default=42)
    options.add_argument("--kib", type=int, default=1024, help="bytes that each rank exchanges")
    return options.parse_args()


if __name__ == "__main__":
    main()
