"""Fits of other people's models, unsharded under "ddp" and sharded under "freescale", and what is compared of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING
from tests.helpers.recommender import trainer

DIM, LENGTH, SAMPLES, STEPS = 8, 10, 8, 50
ITEMS = LARGE_EMBEDDING // DIM + 1
"""The fewest rows that ``shard="auto"`` shards a table for: nothing of it is changed for these tests."""
USERS = 40
CATALOGUE = 2001
"""Rows where the loss is a softmax over all of them, which would take most of the time with more."""
RATES = {"sgd": 0.2, "adagrad": 0.02, "adam": 0.003}
"""Low enough that training does not amplify rounding to anything: ``rounded`` below shows what it does to it."""


def popular(items: int) -> Tensor:
    """Return the items that occur, anywhere in the table, so that batches have rows in common; 0 is padding."""
    return 1 + torch.randperm(items - 1, generator=torch.Generator().manual_seed(7))[:120]


POPULAR = popular(ITEMS)


class LazyAdam(torch.optim.Adam):
    """Adam that updates of tables only the rows that any rank looks up in a step; the others keep their moments.

    Not those with a gradient: where dropout takes all of a row away its gradient is zero, and its moments still move it.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__(parameters, lr=lr)
        self._looked_up = {table.weight: torch.zeros(table.num_embeddings) for table in tables}
        for table in tables:
            table.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, table: nn.Embedding | nn.EmbeddingBag, arguments: tuple[Tensor], named: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            ids = arguments[0] if arguments else named["input"]
            self._looked_up[table.weight][ids.unique()] = 1

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = torch.enable_grad()(closure)()
        before = [[each.clone() for each in self._rows(weight)] for weight in self._looked_up]
        super().step()
        for (weight, looked_up), old in zip(self._looked_up.items(), before):
            dist.all_reduce(looked_up, dist.ReduceOp.MAX)
            for each, was in zip(self._rows(weight), old):
                each[looked_up == 0] = was[looked_up == 0]
            looked_up.zero_()
        return loss

    def _rows(self, weight: Tensor) -> list[Tensor]:
        return [weight, *(self.state[weight].get(name, torch.zeros_like(weight)) for name in ("exp_avg", "exp_avg_sq"))]


class Training(L.LightningModule):
    """What a user writes around a model to train its loss.

    Attributes:
        package: the distribution that the model comes from.
        tables: the paths of the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules that are sharded.
        items: how many there are.
        softmax: whether the loss is over all rows of the tables, so that every step changes all of them, as Adam itself does.
        options: what ``"ddp"`` needs to train it, and ``"freescale"`` as well.
        without_effect: parameters that the loss does not depend on, so that their gradients are rounding alone.
        rates: learning rates, by optimizer.
    """

    package: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    items: ClassVar[int] = ITEMS
    softmax: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}
    without_effect: ClassVar[tuple[str, ...]] = ()
    rates: ClassVar[dict[str, float]] = RATES

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer, self.losses = optimizer, []

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    @classmethod
    def batches(cls, seed: int, count: int) -> list[Any]:
        return sequences(seed, count, cls.items)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lazy adam":
            return LazyAdam(self.parameters(), self.rates["adam"], [self.get_submodule(path) for path in self.tables])
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
        return kinds[self.optimizer](self.parameters(), lr=self.rates[self.optimizer])


def sequences(seed: int, count: int, items: int = ITEMS) -> list[dict[str, Tensor]]:
    """Return batches of histories, padded behind, with a positive and a negative item for each position, and lengths.

    Positives are among the first two thirds of the popular items and negatives among the last, so that there is something to
    learn, and no loss vanishes.
    """
    found, often = [], popular(items)
    for step in range(count):
        draw = torch.Generator().manual_seed(1000 * seed + step)
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=draw)
        there = torch.arange(LENGTH) < lengths[:, None]
        third = len(often) // 3
        drawn = {"items": (0, 3 * third), "positive": (0, 2 * third), "negative": (third, 3 * third)}
        ids = {name: often[torch.randint(*span, (SAMPLES, LENGTH), generator=draw)] * there for name, span in drawn.items()}
        found.append({**ids, "lengths": lengths})
    return found


def clicks(seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return batches of users, histories, and an item each, which the user clicked or not: half of them are positives."""
    found = []
    for batch in sequences(seed, count):
        clicked = torch.arange(SAMPLES) % 2 == 0
        item = torch.where(clicked, batch["positive"][:, 0], batch["negative"][:, 0])
        user = batch["items"][:, 0] % USERS
        found.append({"user": user, "history": batch["items"], "item": item, "clicked": clicked.float()})
    return found


def ranking_loss(states: Tensor, positive: Tensor, negative: Tensor, there: Tensor) -> Tensor:
    """Return the mean loss of preferring the negative rows to the positive ones, where there is an item."""
    return -nn.functional.logsigmoid((states * (positive - negative)).sum(dim=-1))[there].mean()


@dataclass
class Fit:
    """What a fit leaves behind on a rank; whole weights on rank 0 alone."""

    losses: list[float]
    weights: dict[str, Tensor]
    mispredicted: float = 0.0


def strategies(kind: type[Training], **sharding: Any) -> list[DDPStrategy]:
    """The two that are compared; tables that are too small for ``shard="auto"`` are named."""
    shard = list(kind.tables) if kind.items < ITEMS else "auto"
    return [DDPStrategy(**kind.options), FreeScaleStrategy(**{"shard": shard, **sharding}, **kind.options)]


def fit_both(kind: type[Training], optimizer: str, **sharding: Any) -> list[Fit]:
    """Fit on this rank of ``run_distributed``: under "ddp" and under "freescale"."""
    optimizers = reference(kind, optimizer), optimizer
    return [fit(kind, each, strategy) for each, strategy in zip(optimizers, strategies(kind, **sharding))]


def reference(kind: type[Training], optimizer: str) -> str:
    """Return the optimizer under "ddp": of Adam the lazy one, except where every step changes all rows."""
    return "lazy adam" if optimizer == "adam" and not kind.softmax else optimizer


def fit(kind: type[Training], optimizer: str, strategy: DDPStrategy, rounding: float = 0.0) -> Fit:
    """Fit on this rank of ``run_distributed``; every weight begins by the relative error ``rounding`` beside its own."""
    torch.manual_seed(0)
    module = kind(optimizer)
    if rounding:
        draw = torch.Generator().manual_seed(1)
        for weight in module.parameters():
            weight.data *= 1 + rounding * torch.randn(weight.shape, generator=draw).sign()
    fitting = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fitting.fit(module, loader(kind, STEPS))
    weights = fitting._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    report = getattr(strategy, "overlap_report", None)
    mispredicted = 0.0 if report is None else report.mispredicted_lookups
    return Fit(module.losses, weights if fitting.is_global_zero else {}, mispredicted)


def loader(kind: type[Training], count: int, seed: int = 0) -> DataLoader:
    """This rank's batches.

    With a generator: else a DataLoader draws from the global state when an epoch begins, and in a run that resumes there it has
    done so before that state is restored, so that dropout is another.
    """
    batches = kind.batches(10 * seed + int(os.environ["RANK"]), count)
    return DataLoader(batches, batch_size=None, generator=torch.Generator())


def largest_difference(fits: list[list[Fit]]) -> float:
    """Return the largest relative difference of any loss of any rank."""
    pairs = [pair for ddp, mine in fits for pair in zip(ddp.losses, mine.losses, strict=True)]
    return max(abs(mine - expected) / abs(expected) for expected, mine in pairs)
