"""Steps of an HSTU whose dense gradients DDP reduces over a slow link, with different buckets.

``python benchmarks/netlab.py --hosts 2 --rate 50mbit -- python benchmarks/dense_gradients.py``

Each rank trains the model of ``examples/hstu.py`` with one thread, on histories of one length. Compute is real. The variants
take turns in the same processes, and each is a separate fit on the same samples:

floor      DDP exchanges no gradient
torch      torch's own buckets: the first one of 1 MiB, the others of 25 MiB
view       torch's buckets, with ``gradient_as_bucket_view=True``
64, 165    buckets of at least 64 or 165 KiB; also with other numbers
ours       the buckets of the strategy: of a third of the gradients

``split-`` before a name computes the gradients of the weights last. *Exposed* is the median of the step minus the floor's step
on the same samples. *Predicted* is the same from the floor's times of gradients and the link's rate: the buckets leave in
order, each once its last gradient is there, and the link sends one after the other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import lightning as L
import numpy as np
import torch
from demo import quiet
from harness import finish_on_all_ranks, parser
from hstu import CollateWithNegatives, HSTURecommender
from netlab import link_rate
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.data import Histories, HistoryDataset

ITEMS, SKIPPED, SPLIT = 10_000, 4, "split-"
TORCH: dict[str, Any] = {"bucket_cap_mb": None}
"""Options of torch's own buckets."""
OPTIONS: dict[str, dict[str, Any]] = {
    "floor": TORCH, "torch": TORCH, "ours": {}, "view": TORCH | {"gradient_as_bucket_view": True},
}  # fmt: skip


def main() -> None:
    """Run on all ranks."""
    options = _options()
    torch.set_num_threads(1)
    quiet()
    batches = _batches(options)
    names = options.variants
    steps: dict[str, list[Any]] = {name: [] for name in names}
    fits: dict[str, Timed] = {}
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            fits[name] = _fit(name, batches, options)
            steps[name].append(1e3 * np.diff(fits[name].began)[SKIPPED:])
    figures: dict[str, float] = {}
    ranks = int(os.environ["WORLD_SIZE"])
    bandwidth = link_rate(unshaped=float("inf")) * ranks / (2 * (ranks - 1))  # of an all-reduce
    rank_0 = os.environ["RANK"] == "0"
    if rank_0:
        print(f"{'':<14}{'step ms':>9}{'exposed ms':>12}{'predicted':>11}  buckets in KiB")
    for name in names:
        floor, buckets = (SPLIT if name.startswith(SPLIT) else "") + "floor", fits[name].buckets
        lost = [np.median(mine - least) for mine, least in zip(steps[name], steps[floor])]
        low, exposed, high = np.quantile(lost, [0.0, 0.5, 1.0])
        predicted = np.median([_predicted(step, buckets, bandwidth) for step in fits[floor].arrivals[SKIPPED:]])
        found = {"step_ms": np.median(np.concatenate(steps[name])), "exposed_ms": exposed, "exposed_ms_low": low}
        found |= {"exposed_ms_high": high, "predicted_ms": 1e3 * predicted * (name != floor), "buckets": len(buckets)}
        figures |= {f"{name}.{key}": float(value) for key, value in found.items()}
        sizes = ", ".join(f"{size / 1024:.0f}" for size in buckets)
        if rank_0:
            print(f"{name:<14}{found['step_ms']:9.1f}{exposed:12.1f}{found['predicted_ms']:11.1f}  {sizes}")
    figures["dense_bytes"] = float(sum(fits[names[0]].buckets))
    finish_on_all_ranks(figures, options)


class Timed(HSTURecommender):
    """Records the start of each step, the buckets of DDP, and when the gradients arrive."""

    def __init__(self, exchanges: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.exchanges, self.began = exchanges, list[float]()
        self.arrivals: list[list[tuple[float, int]]] = []  # by step: seconds before the end of backward, and bytes

    def on_train_start(self) -> None:
        """Leave out the exchange of the floor, and observe its gradients."""
        if not self.exchanges:
            wrapped: Any = self.trainer.strategy.model
            wrapped.register_comm_hook(None, noop_hook)
            for parameter in wrapped._build_params_for_reducer()[0]:
                parameter.register_post_accumulate_grad_hook(self._note)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the start of a step."""
        self._came: list[tuple[float, int]] = []
        self.began.append(time.perf_counter())

    def _note(self, parameter: torch.Tensor) -> None:
        self._came.append((time.perf_counter(), parameter.numel() * parameter.element_size()))

    def on_after_backward(self) -> None:
        """Keep the arrivals of a step."""
        end = time.perf_counter()
        self.arrivals.append([(end - at, size) for at, size in self._came])

    def on_train_end(self) -> None:
        """Keep the sizes of DDP's buckets."""
        wrapped: Any = self.trainer.strategy.model
        data = wrapped._get_ddp_logging_data()
        self.buckets = [int(size) for size in (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing."""


def _batches(options: Any) -> list[dict[str, Any]]:
    """Return this rank's batches of random histories; few items are popular."""
    draw, count = np.random.default_rng(int(os.environ["RANK"])), options.steps * options.batch_size
    offsets = np.arange(count + 1) * (options.length + 3)  # two items are held out, and the last one has no next
    items = (ITEMS * draw.random(offsets[-1]) ** 3).astype(int)
    histories = Histories(items, np.arange(offsets[-1]) * 3600, offsets, np.arange(count), np.arange(ITEMS))
    dataset, collate = HistoryDataset(histories, np.arange(count), "train"), CollateWithNegatives(ITEMS)
    return [collate([dataset[index] for index in part]) for part in np.arange(count).reshape(options.steps, -1)]


def _fit(name: str, batches: list[dict[str, Any]], options: Any) -> Timed:
    torch.manual_seed(0)
    kind = name.removeprefix(SPLIT)
    given = OPTIONS[kind] if kind in OPTIONS else {"bucket_cap_mb": int(kind) / 1024}
    model = Timed(kind != "floor", num_items=ITEMS, dim=options.dim, layers=options.layers)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(split_backward=name.startswith(SPLIT), **given), accelerator="cpu", devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]), max_epochs=1, limit_val_batches=0, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return model


def _predicted(step: Sequence[tuple[float, int]], buckets: Sequence[int], bandwidth: float) -> float:
    """Return the seconds from the end of backward to the end of the last bucket, for gradients that arrive in this order."""
    ends = np.cumsum([size for _, size in step])
    free = -np.inf
    for size, end in zip(buckets, np.cumsum(buckets)):
        ready = -step[int(np.searchsorted(ends, end))][0]
        free = max(free, ready) + size / bandwidth
    return max(0.0, float(free))


def _options() -> Any:
    options = parser(__doc__)
    add = options.add_argument
    add("--dim", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--batch-size", type=int, default=16, help="samples per rank and step (default: 16)")
    add("--length", type=int, default=200, help="items of a history (default: 200)")
    add("--variants", nargs="+", default=[split + name for split in ("", SPLIT) for name in ("floor", "torch", "ours")])
    add("--steps", type=int, default=24, help=f"steps of a fit; the first {SKIPPED} do not count (default: 24)")
    add("--rounds", type=int, default=5)
    return options.parse_args()


if __name__ == "__main__":
    main()
