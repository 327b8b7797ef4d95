"""Losses over all items of a table in shard=: as with the whole weight under "ddp", however the model computes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale.losses import catalogue_cross_entropy
from tests.helpers.overlap_training import Case, compared

ITEMS, DIM, LENGTH, STEPS = 41, 8, 5, 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}
CLOSE = {"losses": (1e-5, 1e-6), "weights": (1e-4, 1e-6), "states": (1e-4, 1e-7)}


class NextItem(L.LightningModule):
    """Predicts every item of a sequence from those before it; 0 is no item."""

    def __init__(self, style: str, optimizer: str = "adagrad") -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.hidden = nn.Linear(DIM, DIM)
        self.bias = nn.Parameter(0.1 * torch.randn(ITEMS))
        self.style, self.optimizer, self.losses = STYLES[style], optimizer, []
        self.statistics: dict[str, float] = {}

    def states(self, items: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.item_emb(items).cumsum(1)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.style(self, self.states(batch["items"][:, :-1]), batch["items"][:, 1:])
        self.losses.append(loss.item())
        return loss + 0.0 * self.bias.sum()  # a style need not use it

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def _last(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(torch.matmul(hidden[:, -1], model.item_emb.weight.transpose(0, 1)), targets[:, -1])


def _linear(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, model.item_emb.weight, model.bias).float()
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=0, reduction="sum")
    return loss / max(1, int((targets > 0).sum()))


def _selected(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    known = targets > 0
    return F.cross_entropy((hidden @ model.item_emb.weight.T)[known] / 0.7, targets[known], reduction="sum") / 9


def _second(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ model.item_emb.weight.t() + model.bias) * 0.5
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=0, reduction="none", label_smoothing=0.1)
    return losses.sum() / 9


def _log(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    found = torch.log_softmax(hidden @ model.item_emb.weight.T, dim=-1)
    return F.nll_loss(found.flatten(0, 1), targets.reshape(-1), ignore_index=0, reduction="sum") / 9


def _gathered(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    found = (hidden @ model.item_emb.weight.T).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -(found * (targets > 0)).sum() / 9


def _sliced(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ model.item_emb.weight[1:].T + model.bias[1:]
    return F.cross_entropy(logits.view(-1, ITEMS - 1), targets.reshape(-1) - 1, ignore_index=-1, reduction="sum") / 9


def _without_padding(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ model.item_emb.weight.T)[..., 1:]
    return F.cross_entropy(logits[targets > 0], targets[targets > 0] - 1, reduction="sum", label_smoothing=0.2) / 9


def _ours(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    options: Any = {"ignore_index": 0, "reduction": "sum", "temperature": 0.5, "chunk": 3}
    return catalogue_cross_entropy(hidden, model.item_emb, targets, model.bias, **options) / 9


def _twice(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    return (_linear(model, hidden, targets) + _ours(model, hidden * 0.5, targets)) / 2


STYLES: dict[str, Callable[[NextItem, Tensor, Tensor], Tensor]] = {
    "last": _last,
    "linear": _linear,
    "selected": _selected,
    "second": _second,
    "log": _log,
    "gathered": _gathered,
    "sliced": _sliced,
    "without padding": _without_padding,
    "ours": _ours,
    "twice": _twice,
}


def _batches(rank: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Batches of sequences; the ranks' have other sizes, and one has nothing to predict."""
    draw = torch.Generator().manual_seed(100 + rank)
    found = []
    for step in range(steps):
        items = torch.randint(1, ITEMS, (2 + (rank + step) % 3, LENGTH), generator=draw)
        first = torch.randint(0, LENGTH - 1, (len(items), 1), generator=draw)
        known = torch.arange(LENGTH) >= first
        if (step, rank) == (3, 1):
            known[:, 1:-1] = False
        found.append({"items": torch.where(known, items, 0)})
    return found


def _loader() -> DataLoader:
    return DataLoader(_batches(int(os.environ["RANK"])), batch_size=None)


SHARD = {"shard": ["item_emb"]}


def case(style: str, optimizer: str = "adagrad", **rest: Any) -> Case:
    return Case(lambda: NextItem(style, optimizer), _loader, notice=None, **rest)


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "sgd"), (2, "adagrad"), (3, "adam")])
def test_losses_weights_and_states_are_those_of_ddp(ranks: int, optimizer: str) -> None:
    cases = {style: case(style, optimizer) for style in STYLES}
    assert compared(ranks, cases, "ddp", SHARD, **CLOSE) == []


# -- all that a Trainer does


class Tied(NextItem):
    """Its output layer has the weight of its embedding, and comes first."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__("last", optimizer)
        self.style = Tied.by_head
        emb = self.__dict__["_modules"].pop("item_emb")
        self.head = nn.Linear(DIM, ITEMS)
        self.item_emb, self.head.weight = emb, emb.weight

    def by_head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(hidden).float()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=0, reduction="sum")
        return loss / 9

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        hidden, targets = self.states(batch["items"][:, :-1]), batch["items"][:, -1]
        scores = self.head(hidden[:, -1])
        scores.scatter_(1, batch["items"][:, :-1], -torch.inf)
        self.log("val_first", scores.topk(1).indices.float().mean(), sync_dist=True)
        self.log("val", F.cross_entropy(scores, targets), sync_dist=True)
        self.log("val_again", catalogue_cross_entropy(hidden[:, -1], self.item_emb, targets), sync_dist=True)
        self.scored.append(scores.detach().clone())

    def on_fit_start(self) -> None:
        self.scored: list[Tensor] = []


class TwoTables(NextItem):
    """Has another table, which is looked up first, and rows that nobody could know of before."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__("linear", optimizer)
        self.place_emb = nn.Embedding(LENGTH, DIM)

    def states(self, items: Tensor) -> Tensor:
        rest = self.place_emb(torch.arange(items.shape[1])) + self.item_emb((items * 3 + 1) % ITEMS)
        return super().states(items) + rest


class OnlyTheHead(NextItem):
    """Never looks its table up."""

    def __init__(self) -> None:
        super().__init__("linear")
        self.dense = nn.Parameter(torch.randn(ITEMS, DIM))

    def states(self, items: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.dense[items]))


class Frozen(NextItem):
    """Its table stays as it is."""

    def __init__(self) -> None:
        super().__init__("linear", "sgd")
        self.item_emb.weight.requires_grad_(False)


class FirstLater(NextItem):
    """Computes a loss over all items from the third step on, and not in every one."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step in (0, 1, 4):
            loss = (self.states(batch["items"]) ** 2).sum() / 9
            self.losses.append(loss.item())
            return loss + 0.0 * self.bias.sum()
        return super().training_step(batch, batch_idx)


def of(make: Callable[[], Any], **rest: Any) -> Case:
    return Case(make, _loader, notice=None, **rest)


def with_options(**options: Any) -> Case:
    return case("linear", "sgd", options=options)  # Adagrad divides small gradients by themselves, and so their rounding


CASES = {
    "tied head": of(Tied),
    "tied head, adam": of(lambda: Tied("adam")),
    "validated": of(Tied, validation=_loader, options={"val_check_interval": 2}),
    "windows": with_options(accumulate_grad_batches=2),
    "clipped by norm": with_options(gradient_clip_val=0.05),
    "clipped by value": with_options(gradient_clip_val=0.005, gradient_clip_algorithm="value"),
    "windows, clipped": with_options(accumulate_grad_batches=2, gradient_clip_val=0.05),
    "two tables": of(TwoTables, overlap={"shard": ["item_emb", "place_emb"]}),
    "only the head": of(OnlyTheHead),
    "frozen": of(Frozen),
    "later": of(lambda: FirstLater("linear", "adagrad")),
    "later, windows": of(lambda: FirstLater("linear", "sgd"), options={"accumulate_grad_batches": 2}),
    "split backward": case("linear", overlap={"split_backward": True}),
    "no overlap": case("linear", overlap={"overlap": False}),
    "without dedup": case("linear", overlap={"dedup": False}),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_under_ddp(ranks: int) -> None:
    assert compared(ranks, CASES, "ddp", SHARD, **CLOSE) == []
