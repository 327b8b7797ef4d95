"""Models with a loss over all items of a table, in the styles in which packages write it, and their batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.losses import catalogue_cross_entropy
from tests.helpers.overlap_training import Case

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

    def on_train_end(self) -> None:
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            self.statistics = self.trainer.strategy.engine.statistics()


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


def _masked(model: NextItem, hidden: Tensor, targets: Tensor) -> Tensor:
    items = torch.ones(ITEMS, dtype=torch.bool)
    items[0].zero_()
    logits = F.linear(hidden, model.item_emb.weight[items])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1) - 1, ignore_index=-1, reduction="sum") / 9


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
    "masked": _masked,
    "without padding": _without_padding,
    "ours": _ours,
    "twice": _twice,
}


def batches_of(rank: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
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


def loader() -> DataLoader:
    return DataLoader(batches_of(int(os.environ["RANK"])), batch_size=None)


SHARD = {"shard": ["item_emb"]}


def of(make: Callable[[], Any], **rest: Any) -> Case:
    options = {"max_epochs": 1, **rest.pop("options", {})}
    return Case(make, loader, options, notice=None, **rest)


def case(style: str, optimizer: str = "adagrad", **rest: Any) -> Case:
    return of(lambda: NextItem(style, optimizer), **rest)
