"""All bubbles, end to end through Lightning: plain TorchRec + DDP, and the effect of each technique.

``python benchmarks/netlab.py --hosts 8 --rate 50mbit -- python benchmarks/end_to_end.py --compute-ms 720``

Each rank trains on ``--batch`` histories per step with the lengths of ml-latest-small. Items are Zipf-distributed over
``--rows`` rows. Compute is a sleep in proportion to the ids: ``--compute-ms`` for a mean batch, a third of it in forward. The
bubble is 1 - compute summed over ranks / (ranks x wall time of the step). It contains data, optimizer, host work and all waits.
The variants take turns in the same processes. Each is a separate fit on the same samples:

floor      equal costs on all ranks and no embedding exchange: the time of the loop, DDP and this machine
plain      samples as drawn, TorchRec's own exchange
balanced   samples assigned by cost, with counts that differ by up to 25 %
overlapped balanced, with rows exchanged behind compute
split      overlapped, with the gradients of the dense weights, a share of compute, after those of the rows
micro-4    overlapped, each batch in 4 micro-batches; also with other numbers; split-4: both
auto       overlapped, with micro_batches="auto": its first whole epoch with the chosen number, compared with second epochs
autopilot  overlapped, with FreeScaleStrategy(target_bubble_reduction=0.9): its first whole epoch with the chosen settings

To check the chosen number, use ``--variants overlapped micro-2 micro-4 micro-8 auto --require "auto_over_best<=1.02"``. For the
autopilot, use ``autopilot_over_best`` and add the split variants.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning as L
import numpy as np
import overlap_variants
import overlap_workload
import planted
import torch
from harness import finish_on_all_ranks, parser
from torch import Tensor
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.page import write_page

FIXED = ("overlapped", "micro-2", "micro-4", "micro-8")
FIXED_SPLIT = ("split", "split-2", "split-4", "split-8")
VARIANTS = ("floor", "plain", "balanced", *FIXED, *FIXED_SPLIT, "auto", "autopilot")
BY_DEFAULT = ("floor", "plain", "balanced", "overlapped", "split", "micro-4")
LABELS = {
    "plain": "plain TorchRec + DDP",
    "balanced": "samples balanced",
    "overlapped": "exchange overlapped",
    "split": "backward split",
}
"""How a profile calls the ladder of techniques, each with those before it."""
SKIPPED = 4
"""Steps at the beginning of a fit, while lookahead and pipelines fill."""


def main() -> None:
    """Run on all ranks."""
    options = _options()
    world, data = int(os.environ["WORLD_SIZE"]), Histories(options)
    walls: dict[str, list[float]] = {name: [] for name in options.variants}
    computed: dict[str, list[float]] = {name: [] for name in options.variants}
    chosen, kept = [], dict[str, float]()
    for number in range(options.rounds):
        for name in options.variants:
            model = _fit(name, data, options, seed=number)
            walls[name] += np.diff(model.began)[SKIPPED - 1 : -1].tolist()
            computed[name] += model.computed[SKIPPED - 1 : -2]
            chosen += [model.trainer.datamodule.train.micro_batches.chosen] if name == "auto" else []
            if name == "autopilot":  # in the last round
                settings = model.trainer.strategy.chosen_settings["kept"]
                kept = {f"autopilot_kept_{setting}": float(value) for setting, value in settings.items()}
    figures = _figures(walls, computed, world) | kept
    figures |= {f"auto_chose_{each}": float(chosen.count(each)) for each in set(chosen)}
    if int(os.environ["RANK"]) == 0:
        _show(figures, options)
        if options.profile is not None:
            reports = [read(options.profile / name / "report.json") for name in options.variants]
            for name, document in zip(options.variants, reports):
                document["run"]["label"] = LABELS.get(name, name)
            print("page:", write_page(options.profile / "report.html", reports))
    finish_on_all_ranks(figures, options)


class Histories(Dataset[Tensor]):
    """The ids of one history for each sample, drawn from its index."""

    def __init__(self, options: Any) -> None:
        world = int(os.environ["WORLD_SIZE"])
        draw, steps = overlap_workload.production(options.rows, options.batch), options.steps + SKIPPED
        drawn = [draw(step, rank) for step in range(steps) for rank in range(world)]
        ids, lengths = (np.concatenate(parts) for parts in zip(*drawn))
        self.lengths, self._ids = lengths, torch.from_numpy(ids).split(lengths.tolist())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index]


class Sleeper(L.LightningModule):
    """A table of items and a small dense part; sleeps in proportion to its ids."""

    def __init__(self, options: Any, seconds_per_id: float, exchanges: bool) -> None:
        super().__init__()
        self._late_seconds = 0.0
        config = EmbeddingConfig(num_embeddings=options.rows, embedding_dim=options.dim, name="item", feature_names=["item"])
        self.items: Any = (
            EmbeddingCollection(tables=[config], device=torch.device("meta"))
            if exchanges
            else overlap_variants.LocalRows(options.dim)
        )
        self.dense = torch.nn.Sequential(torch.nn.Linear(options.dim, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.seconds_per_id = seconds_per_id
        # with a trial, all variants see the samples once before; otherwise only one would find warm rows
        self.epochs_before = int("auto" in options.variants or "autopilot" in options.variants)
        self.began: list[float] = []
        self.computed: list[float] = []

    def on_train_epoch_start(self) -> None:
        """Note whether all steps of this epoch have the final number of micro-batches; only such an epoch counts."""
        self.began, self.computed = [], []
        strategy: Any = self.trainer.strategy
        decided = self.trainer.datamodule.train.micro_batches.decided
        if strategy.autopilot is not None:
            decided = strategy.autopilot.frozen
        self.is_last_epoch = decided and self.trainer.current_epoch >= self.epochs_before

    def on_train_epoch_end(self) -> None:
        """End the fit after that epoch."""
        self.trainer.should_stop = self.is_last_epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the start of a step."""
        self.began.append(time.perf_counter())
        self.computed.append(0.0)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        """Look up and compute."""
        seconds = self.seconds_of(batch)
        self.computed[-1] += seconds
        rows = self.rows_of(batch)
        step = self.trainer.strategy.table_step
        if step is not None and step.engine is not None and step.split_backward:
            # those of micro-batches come with the last
            self._late_seconds += seconds
            last = step.engine.updates
            rows = overlap_variants.compute_split(rows, seconds, self._late_seconds if last else 0.0, self.dense[0].weight)
            self._late_seconds *= not last
        else:
            rows = overlap_variants.compute(rows, None, seconds)
        return self.dense(rows).square().mean()

    def seconds_of(self, batch: KeyedJaggedTensor) -> float:
        """Return the duration of compute."""
        return self.seconds_per_id * len(batch.values())

    def rows_of(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the looked up rows, shape ``[ids, dim]``."""
        rows: Tensor = self.items(batch)["item"].values()
        return rows

    def configure_optimizers(self) -> Any:
        """Return row-wise Adagrad for the table; it excludes biases, so these stay unchanged."""
        return RowWiseAdagrad([each for each in self.parameters() if each.dim() == 2], lr=0.1)


def _collate(samples: list[Tensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], torch.cat(samples), lengths=torch.tensor([len(ids) for ids in samples]).int())


def _fit(name: str, data: Histories, options: Any, seed: int) -> Sleeper:
    world = int(os.environ["WORLD_SIZE"])
    seconds_per_id = options.compute_ms / 1000 / (options.batch * data.lengths.mean())
    torch.manual_seed(0)
    model = Sleeper(options, seconds_per_id, exchanges=name != "floor")
    micro_batches: Any = int(name.rpartition("-")[2]) if "-" in name else 1
    if name in ("auto", "autopilot"):
        micro_batches = "auto"
    strategy = FreeScaleStrategy(
        overlap="torchrec" if name in ("plain", "balanced") else True,
        split_backward=name.startswith("split"),
        target_bubble_reduction=0.9 if name == "autopilot" else None,
    )
    balance: Any = name != "plain" and BalanceOptions(assignment_mode="slack")
    module = FreeScaleDataModule(
        data, data.lengths, options.batch, cost=lambda lengths: lengths, collate_fn=_collate, balance=balance, seed=seed,
        loss_reduction="target_mean", micro_batches=micro_batches,
    )  # fmt: skip
    profiled: list[Any] = []
    if options.profile is not None:
        profiler = BubbleProfiler(options.profile / name, verbose=False)
        profiler.options = replace(profiler.options, warmup_steps=SKIPPED)
        profiled = [profiler]
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=world, callbacks=profiled,
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=module)
    if name == "autopilot" and trainer.is_global_zero:
        print("autopilot:", strategy.chosen_settings["kept"])
    return model


def _figures(walls: dict[str, list[float]], computed: dict[str, list[float]], world: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in walls:
        mean = torch.tensor([walls[name], computed[name]], dtype=torch.float64)
        torch.distributed.all_reduce(mean)
        wall, compute = (mean / world).numpy()
        key = name.replace("-", "_")
        low, middle, high = np.percentile(wall - compute, [25, 50, 75])
        figures |= {f"{key}_lost_ms": 1e3 * middle, f"{key}_lost_low_ms": 1e3 * low, f"{key}_lost_high_ms": 1e3 * high}
        figures |= {f"{key}_ms": 1e3 * float(wall.mean()), f"{key}_compute_ms": 1e3 * float(compute.mean())}
        figures[f"{key}_bubble"] = float(1 - compute.sum() / wall.sum())
    for name in (key.removesuffix("_bubble") for key in list(figures) if key.endswith("_bubble")):
        if "plain_ms" in figures and name not in ("plain", "floor"):
            lost = figures["plain_ms"] - figures["plain_compute_ms"]
            figures[f"{name}_fewer"] = 1 - (figures[f"{name}_ms"] - figures[f"{name}_compute_ms"]) / lost
            figures[f"{name}_speed_up"] = figures["plain_ms"] / figures[f"{name}_ms"]
            figures[f"{name}_of_possible"] = figures[f"{name}_speed_up"] * figures["plain_compute_ms"] / figures["plain_ms"]
    # the last epochs of the variants differ in compute
    compute = float(np.mean([figures[f"{name.replace('-', '_')}_compute_ms"] for name in walls]))
    typical = {name: figures[f"{name.replace('-', '_')}_lost_ms"] + compute for name in walls}
    for name, all_fixed in (("auto", FIXED), ("autopilot", FIXED + FIXED_SPLIT)):
        fixed = [typical[each] for each in all_fixed if each in walls]
        if name in walls and fixed:
            figures[f"{name}_over_best"] = typical[name] / min(fixed)
    return {key: float(value) for key, value in figures.items()}


def _show(figures: dict[str, float], options: Any) -> None:
    rate, world = os.environ.get("NETLAB_RATE", "unknown rate"), os.environ["WORLD_SIZE"]
    print(f"{world} ranks, links of {rate}, {options.batch} histories per rank and step, compute {options.compute_ms:g} ms")
    print(
        f"{'':<12}{'step ms':>9}{'bubble':>9}{'lost ms':>9}{'half within':>17}{'fewer':>8}{'speed-up':>10}{'of possible':>13}"
    )
    for name in options.variants:
        key = name.replace("-", "_")
        half = f"{figures[f'{key}_lost_low_ms']:.1f} - {figures[f'{key}_lost_high_ms']:.1f}"
        print(
            f"{name:<12}{figures[f'{key}_ms']:9.1f}{figures[f'{key}_bubble']:9.1%}{figures[f'{key}_lost_ms']:9.1f}{half:>17}",
            end="",
        )
        if f"{key}_fewer" in figures:
            of_possible = figures[f"{key}_of_possible"]
            print(f"{figures[f'{key}_fewer']:8.1%}{figures[f'{key}_speed_up']:10.2f}{of_possible:13.1%}", end="")
        print()
    chosen = [key.removeprefix("auto_chose_") for key in figures if key.startswith("auto_chose_")]
    if "auto_over_best" in figures:
        ratio = figures["auto_over_best"]
        print(f"auto chose {' and '.join(chosen)}; a typical step takes {ratio:.3f} of that of the best fixed number")
    if "autopilot_over_best" in figures:
        ratio = figures["autopilot_over_best"]
        print(f"with the autopilot's settings, a typical step takes {ratio:.3f} of that of the best fixed settings")


def _options() -> Any:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(BY_DEFAULT))
    add("--compute-ms", type=float, default=240.0, help="sleep of a mean step (default: 240)")
    add("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    add("--rows", type=int, default=5_000_000)
    add("--dim", type=int, default=64)
    add(
        "--weights-share",
        type=float,
        default=0.15,
        help="share of compute that a split backward does last (default: 0.15)",
    )
    add("--steps", type=int, default=16, help="steps of a fit (default: 16)")
    add("--rounds", type=int, default=2)
    add("--profile", type=Path, metavar="FOLDER", help="profile all variants, and write reports, traces and a page there")
    options = arguments.parse_args()
    planted.be_quiet()
    overlap_variants.weights_share = options.weights_share
    return options


if __name__ == "__main__":
    main()
