"""Training under the strategy in two processes on one device, against the unsharded module under ``"ddp"``."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import one_rank
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from two_ranks_lanes import say_death
from two_ranks_pair import Rank

from lightning_freescale import FreeScaleStrategy

ITEMS, DIM, SAMPLES, LENGTH, STEPS = 5000, 64, 64, 20, 8
DIES_IN_STEP = 3
ALLOWED = 1e-6  # relative to the largest weight: the effect of another order of summation
Batch = dict[str, Tensor]


class Recommender(L.LightningModule):
    """Compares the mean of a history with the next item; the table is an ``nn.Embedding`` that the strategy shards.

    With ``softmax``, the next item is predicted among all items, by a product with the table's weight.
    """

    def __init__(self, softmax: bool = False, dies: Rank | None = None) -> None:
        super().__init__()
        self.softmax = softmax
        self.items = nn.Embedding(ITEMS, DIM)
        self.dense = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.losses: list[float] = []
        self.begun = 0.0
        self._dies = dies

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss, or die if this rank has to."""
        if self._dies is not None and self._dies.rank == 1 and batch_idx == DIES_IN_STEP:
            self._dies.die()
        self.begun = time.monotonic()
        rows = self.items(batch["items"])
        hidden = self.dense(rows[:, :-1].mean(1))
        if self.softmax:
            loss = nn.functional.cross_entropy(hidden @ self.items.weight.T, batch["items"][:, -1])
        else:
            loss = nn.functional.binary_cross_entropy_with_logits((hidden * rows[:, -1]).sum(1), batch["liked"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD: its sums are linear, so another order of summation changes the result by rounding only."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Batches(Dataset):
    """The batches of one rank."""

    def __init__(self, rank: int) -> None:
        draw = torch.Generator().manual_seed(rank)
        self._items = torch.randint(0, ITEMS, (STEPS, SAMPLES, LENGTH), generator=draw)
        self._liked = torch.rand(STEPS, SAMPLES, generator=draw).round()

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Batch:
        return {"items": self._items[step], "liked": self._liked[step]}


def train(rank: Rank, transport: str, folder: Path) -> None:
    """Train both losses under ``"ddp"`` and under the strategy; then rank 1 is killed in a third fit. Collective."""
    limit = timedelta(seconds=rank.timeout)
    for softmax in (False, True):
        whole = DDPStrategy(process_group_backend="gloo", timeout=limit)
        usual, reference = _fit(rank, softmax, whole, folder / "ddp.ckpt")
        ours, found = _fit(rank, softmax, _strategy(transport, limit), folder / "freescale.ckpt")
        if rank.rank == 0:
            _say_difference(rank, transport + "_softmax" * softmax, usual, reference, ours, found)
    dying = Recommender(dies=rank)
    try:
        _trainer(_strategy(transport, limit), folder).fit(dying, DataLoader(Batches(rank.rank), batch_size=None))
        noticed = None
    except BaseException as error:  # Lightning turns some errors into SystemExit
        noticed = error if isinstance(error, Exception) else RuntimeError(repr(error))
    say_death(rank, transport, "strategy", time.monotonic() - dying.begun, noticed)


def _strategy(transport: str, limit: timedelta) -> FreeScaleStrategy:
    return FreeScaleStrategy(transport=transport, shard=["items"], process_group_backend="gloo", timeout=limit)


def _fit(rank: Rank, softmax: bool, strategy: DDPStrategy, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and unsharded weights; the weights on rank 0 alone."""
    L.seed_everything(1)
    module, trainer = Recommender(softmax), _trainer(strategy, path.parent)
    trainer.fit(module, DataLoader(Batches(rank.rank), batch_size=None))
    trainer.save_checkpoint(path)
    return module.losses, torch.load(path, map_location="cpu", weights_only=False)["state_dict"] if rank.rank == 0 else {}


def _trainer(strategy: DDPStrategy, folder: Path) -> L.Trainer:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return one_rank.trainer(device, num_nodes=2, strategy=strategy, max_epochs=1, default_root_dir=folder)


def _say_difference(
    rank: Rank, name: str, usual: list[float], reference: dict[str, Tensor], ours: list[float], found: dict[str, Tensor]
) -> None:
    if found.keys() != reference.keys() or len(usual) != len(ours):
        error = f"{len(ours)} steps and the weights {sorted(found)}, under ddp {len(usual)} and {sorted(reference)}"
        rank.say(("fail", {"what": f"training, {name}", "error": error}))
        return
    largest = max(float(weight.abs().max()) for weight in reference.values())
    # torch's max, since Python's loses a nan
    weights = float(torch.stack([(found[name] - reference[name]).abs().max() for name in reference]).max()) / largest
    losses = float((torch.tensor(ours) - torch.tensor(usual)).abs().max() / torch.tensor(usual).abs().max())
    on = "GPU" if torch.cuda.is_available() else "CPU"
    cells = {"trained with": name, "on": on, "steps": len(ours), "loss": ours[-1]}
    rank.say(("row", cells | {"weights from ddp's": weights, "losses from ddp's": losses, "allowed": ALLOWED}))
    rank.say(("figure", {"name": f"{name}_weights_from_ddp", "value": weights}))
    if not (weights <= ALLOWED and losses <= ALLOWED):
        error = f"weights differ by {weights:.2g} of the largest, losses by {losses:.2g}; allowed is {ALLOWED:g}"
        rank.say(("fail", {"what": f"training, {name}", "error": error}))
