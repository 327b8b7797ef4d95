"""Losses over a sample of the catalogue, of a table in shard=: as under "ddp", and with which of their rows fetched ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.overlap_training import Case, compared

ITEMS, DIM, LENGTH, STEPS = 300, 8, 6, 5
SHARED, PER_POSITION = 64, 4
"""Negatives of all positions of a batch together, or of each of them alone."""
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}
CLOSE = {"losses": (1e-5, 1e-6), "weights": (1e-4, 1e-6), "states": (1e-4, 1e-7)}
Batch = dict[str, Tensor]


class Sampled(L.LightningModule):
    """Predicts every item of a sequence from those before it; 0 is no item, and small ids are popular."""

    def __init__(self, loss: Callable[[Sampled, Batch], Tensor], optimizer: str = "adagrad") -> None:
        super().__init__()
        self.item_emb, self.hidden = nn.Embedding(ITEMS, DIM, padding_idx=0), nn.Linear(DIM, DIM)
        self.register_buffer("log_q", -torch.log(torch.arange(ITEMS) + 2.0))
        self.loss, self.optimizer, self.losses = loss, optimizer, []
        self.statistics: dict[str, float] = {}

    def states(self, batch: Batch) -> Tensor:
        return torch.tanh(self.hidden(self.item_emb(batch["items"][:, :-1]).cumsum(1)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def on_train_end(self) -> None:
        controller = getattr(self.trainer.strategy, "overlap_controller", None)
        if controller is not None:
            self.statistics = controller.engine.statistics()


def sampled_softmax(model: Sampled, batch: Batch) -> Tensor:
    hidden, targets, negatives = model.states(batch), batch["items"][:, 1:], batch["shared"]
    positive = (hidden * model.item_emb(targets)).sum(-1, keepdim=True) - model.log_q[targets][..., None]
    negative = hidden @ model.item_emb(negatives).T - model.log_q[negatives]
    logits = torch.cat([positive, negative.masked_fill(targets[..., None] == negatives, -torch.inf)], dim=-1)
    return F.cross_entropy(logits[targets > 0], targets.new_zeros(int((targets > 0).sum())))


def gbce(model: Sampled, batch: Batch) -> Tensor:
    hidden, targets, negatives = model.states(batch), batch["items"][:, 1:], batch["own"]
    rate, calibration = PER_POSITION / (ITEMS - 2), 0.75
    beta = rate * (calibration * (1 - 1 / rate) + 1 / rate)
    positive = beta * F.logsigmoid((hidden * model.item_emb(targets)).sum(-1))  # log(sigmoid(s) ** beta)
    negative = F.logsigmoid(-(hidden[..., None, :] * model.item_emb(negatives)).sum(-1)).sum(-1)
    return -(positive + negative)[targets > 0].mean() / (PER_POSITION + 1)


def in_batch(model: Sampled, batch: Batch) -> Tensor:
    targets = batch["items"][:, 1:]
    known = targets > 0
    return _over_positives(model, model.states(batch)[known], targets[known], model.item_emb(targets)[known])


def in_batch_of_selected(model: Sampled, batch: Batch) -> Tensor:
    targets = batch["items"][:, 1:]
    ids = targets[targets > 0]
    return _over_positives(model, model.states(batch)[targets > 0], ids, model.item_emb(ids))


def _over_positives(model: Sampled, hidden: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    places = torch.arange(len(ids))
    hits = (ids[:, None] == ids) & (places[:, None] != places)
    return F.cross_entropy((hidden @ rows.T - model.log_q[ids]).masked_fill(hits, -torch.inf), places)


def drawn(loss: Callable[[Sampled, Batch], Tensor], name: str) -> Callable[[Sampled, Batch], Tensor]:
    """Return the loss with negatives that the step draws, from the global random state."""
    return lambda model, batch: loss(model, {**batch, name: torch.randint(1, ITEMS, batch[name].shape)})


def _loader() -> DataLoader:
    """Batches of this rank, of other sizes than those of others, with the negatives that a collate function has drawn."""
    rank, found = int(os.environ["RANK"]), []
    draw = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        shape = (2 + (rank + step) % 3, LENGTH)
        popular = (torch.exp(torch.rand(shape, generator=draw) * math.log(ITEMS - 1))).long()
        known = torch.arange(LENGTH) >= torch.randint(0, LENGTH - 1, (shape[0], 1), generator=draw)
        own = torch.randint(1, ITEMS, (shape[0], LENGTH - 1, PER_POSITION), generator=draw)
        shared = torch.randint(1, ITEMS, (SHARED,), generator=draw)
        found.append({"items": torch.where(known, popular, 0), "own": own, "shared": shared})
    return DataLoader(found, batch_size=None)


def case(loss: Any, lookups: int, optimizer: str, known: bool = True) -> Case:
    # where they stand is learned in the first step, and the second step's are asked for before it
    ahead = (lookups * (STEPS - 2), lookups * 2, 0) if known else (0, lookups * STEPS, 0)
    notice = "" if known else "'item_emb': they do not stand in the batch"
    return Case(lambda: Sampled(loss, optimizer), _loader, {"max_epochs": 1}, ahead=ahead, notice=notice)


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adagrad"), (2, "sgd"), (3, "adagrad")])
def test_as_under_ddp_and_in_time_where_the_negatives_stand_in_the_batch(ranks: int, optimizer: str) -> None:
    cases = {
        "sampled softmax": case(sampled_softmax, 3, optimizer),
        "sampled softmax, drawn": case(drawn(sampled_softmax, "shared"), 3, optimizer, known=False),
        "gBCE": case(gbce, 3, optimizer),
        "gBCE, drawn": case(drawn(gbce, "own"), 3, optimizer, known=False),
        "in-batch": case(in_batch, 2, optimizer),
        "in-batch, of selected": case(in_batch_of_selected, 2, optimizer, known=False),
    }
    assert compared(ranks, cases, "ddp", {"shard": ["item_emb"]}, **CLOSE) == []
