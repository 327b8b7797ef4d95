"""Steps of a softmax over all items: the table whole under "ddp", and sharded.

``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/catalogue.py``

Every variant trains the same model on the same batches under the Trainer, in the same processes, one after the other in every
round. The ratio of a round is its median step over that of "ddp". ``alone`` is the same computation with the whole table and
without any exchange: what a step under "ddp" would take on an infinitely fast network.

kept        the logits of all positions against this rank's rows are kept for backward
recomputed  backward computes them again, chunk by chunk

``--memory POSITIONS`` measures, with that many positions, the peak memory of a step with recomputation, and of one with all
logits on rank 0 alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo import quiet
from harness import finish_on_all_ranks, parser
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy, losses

SKIPPED = 2
"""Steps at the beginning of a fit."""
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""What this rank has sent, on netlab."""


class Tied(L.LightningModule):
    """A hidden state for each item, and a prediction of the next item among all."""

    def __init__(self, items: int, dim: int) -> None:
        super().__init__()
        self.items, self.hidden = nn.Embedding(items, dim), nn.Linear(dim, dim)
        nn.init.normal_(self.items.weight, std=0.1)
        self.began: list[float] = []
        self.sent: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of all positions."""
        self.began.append(time.perf_counter())
        self.sent.append(int(SENT.read_text()) if SENT.exists() else 0)
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the usual cross-entropy over the logits of all items."""
        hidden = torch.tanh(self.hidden(self.items(batch[0])))
        return F.cross_entropy(hidden @ self.items.weight.T, batch[1])

    def configure_optimizers(self) -> Any:
        """Return Adagrad for all parameters."""
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def main() -> None:
    """Run on all ranks."""
    add = (options := parser(__doc__)).add_argument
    add("--items", type=int, default=200_000)
    add("--dim", type=int, default=64)
    add("--positions", type=int, default=256, help="positions of each rank and step (default: 256)")
    add("--steps", type=int, default=6, help="steps of a fit (default: 6)")
    add("--rounds", type=int, default=3)
    add("--memory", type=int, metavar="POSITIONS")
    given = options.parse_args()
    torch.set_num_threads(1)
    quiet()
    dist.init_process_group("gloo")
    figures = _times(given) if given.memory is None else _memory(given)
    finish_on_all_ranks(figures, given)


def _times(given: Any) -> dict[str, float]:
    batches = _batches(given, given.positions, given.steps)
    variants = {"ddp": "ddp", "kept": "shard", "recomputed": "shard", "alone": ""}
    times: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, float] = {}
    for number in range(given.rounds):
        for name in list(variants)[:: 1 if number % 2 else -1]:
            model = _model(given)
            if name == "alone":
                began = _alone(model, batches)
            else:
                _fit(model, batches, variants[name], keeps=name != "recomputed")
                began, counted = model.began, np.diff(model.sent)[SKIPPED:]
                sent[name] = float(np.median(counted))
            times[name].append(1e3 * float(np.median(np.diff(began)[SKIPPED:])))
    mean = torch.tensor([[*times[name], sent.get(name, 0.0)] for name in variants], dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    figures: dict[str, float] = {}
    of_ddp = mean[0, :-1].numpy()
    for name, (*steps, moved) in zip(variants, mean.tolist()):
        low, ratio, high = np.quantile(np.array(steps) / of_ddp, [0.25, 0.5, 0.75])
        figures |= {f"{name}_ms": float(np.median(steps)), f"{name}_ratio": float(ratio), f"{name}_bytes": moved}
        figures |= {f"{name}_low": float(low), f"{name}_high": float(high)}
        figures[f"{name}_bytes_ratio"] = moved / mean[0, -1].item() if mean[0, -1] else 0.0
        if dist.get_rank() == 0:
            half = f"half of the rounds within {low:.2f} to {high:.2f}"
            print(f"{name:<11} {np.median(steps):8.0f} ms, ratio {ratio:.2f} ({half}), sent {moved / 1e6:.2f} MB", flush=True)
    return figures


def _model(given: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(given.items, given.dim)


def _batches(given: Any, positions: int, steps: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return [torch.randint(0, given.items, (2, positions), generator=draw) for _ in range(steps)]


def _fit(model: Tied, batches: list[Tensor], variant: str, keeps: bool) -> None:
    kept, losses._KEPT_LOGITS = losses._KEPT_LOGITS, losses._KEPT_LOGITS if keeps else 0
    trainer = L.Trainer(
        strategy="ddp" if variant == "ddp" else FreeScaleStrategy(shard=["items"]),
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    losses._KEPT_LOGITS = kept


def _alone(model: Tied, batches: list[Tensor]) -> list[float]:
    """Train without any exchange, on all ranks at the same time."""
    optimizer = model.configure_optimizers()
    began = []
    for batch in batches:
        dist.barrier()
        began.append(time.perf_counter())
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return began


def _memory(given: Any) -> dict[str, float]:
    """Return the peak memory beyond that before the first step, in MiB."""
    batches = _batches(given, given.memory, 2)
    model = _model(given)
    start = _reset_peak()
    _fit(model, batches, "shard", keeps=False)
    sharded = _peak() - start
    whole = 0.0
    if dist.get_rank() == 0:
        model = _model(given)
        start = _reset_peak()
        for batch in batches:
            model.loss(batch).backward()
        whole = _peak() - start
        print(
            f"{given.memory} positions: {whole:.0f} MiB with all logits, {sharded:.0f} MiB sharded and recomputed", flush=True
        )
    dist.barrier()
    return {"whole_mib": whole, "sharded_mib": sharded, "memory_ratio": sharded / whole if whole else 0.0}


def _reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
