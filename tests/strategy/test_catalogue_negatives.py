"""Losses over a sample of the catalogue, of a table in shard=: as under "ddp", and with which of their rows fetched ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.catalogue_models import CLOSE, DIM, SHARD, STEPS, NextItem
from tests.helpers.overlap_training import Case, compared, not_refused

ITEMS, LENGTH = 300, 6
SHARED, PER_POSITION = 64, 4
"""Negatives of all positions of a batch together, or of each of them alone."""
Batch = dict[str, Tensor]


class Sampled(NextItem):
    """Has a loss of the whole batch; small ids are popular."""

    def __init__(self, loss: Callable[[Sampled, Batch], Tensor], optimizer: str = "adagrad") -> None:
        super().__init__("last", optimizer)
        self.item_emb, self.bias, self.loss = nn.Embedding(ITEMS, DIM, padding_idx=0), None, loss
        self.register_buffer("log_q", -torch.log(torch.arange(ITEMS) + 2.0))

    def states_of(self, batch: Batch) -> Tensor:
        return self.states(batch["items"][:, :-1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self, batch)
        self.losses.append(loss.item())
        return loss


def sampled_softmax(model: Sampled, batch: Batch) -> Tensor:
    hidden, targets, negatives = model.states_of(batch), batch["items"][:, 1:], batch["shared"]
    positive = (hidden * model.item_emb(targets)).sum(-1, keepdim=True) - model.log_q[targets][..., None]
    negative = hidden @ model.item_emb(negatives).T - model.log_q[negatives]
    logits = torch.cat([positive, negative.masked_fill(targets[..., None] == negatives, -torch.inf)], dim=-1)
    return F.cross_entropy(logits[targets > 0], targets.new_zeros(int((targets > 0).sum())))


def gbce(model: Sampled, batch: Batch) -> Tensor:
    hidden, targets, negatives = model.states_of(batch), batch["items"][:, 1:], batch["own"]
    rate, calibration = PER_POSITION / (ITEMS - 2), 0.75
    beta = rate * (calibration * (1 - 1 / rate) + 1 / rate)
    positive = beta * F.logsigmoid((hidden * model.item_emb(targets)).sum(-1))  # log(sigmoid(s) ** beta)
    negative = F.logsigmoid(-(hidden[..., None, :] * model.item_emb(negatives)).sum(-1)).sum(-1)
    return -(positive + negative)[targets > 0].mean() / (PER_POSITION + 1)


def in_batch(model: Sampled, batch: Batch, selected: bool = False) -> Tensor:
    """Take the positives of other positions as negatives; ``selected`` looks up no padding, but ids that no batch holds."""
    targets, known = batch["items"][:, 1:], batch["items"][:, 1:] > 0
    ids, hidden = targets[known], model.states_of(batch)[known]
    rows, places = model.item_emb(ids) if selected else model.item_emb(targets)[known], torch.arange(len(ids))
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
    # the first step shows where ids stand in a batch, and the second one's are asked for before that
    ahead = (lookups * (STEPS - 2), lookups * 2, 0) if known else (0, lookups * STEPS, 0)
    notice = "" if known else "'item_emb': they are not in the batch"
    return Case(lambda: Sampled(loss, optimizer), _loader, {"max_epochs": 1}, ahead=ahead, notice=notice)


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (3, "adagrad")])
def test_as_under_ddp_and_in_time_where_the_negatives_stand_in_the_batch(ranks: int, optimizer: str) -> None:
    cases = {
        "sampled softmax": case(sampled_softmax, 3, optimizer),
        "sampled softmax, drawn": case(drawn(sampled_softmax, "shared"), 3, optimizer, known=False),
        "gBCE": case(gbce, 3, optimizer),
        "gBCE, drawn": case(drawn(gbce, "own"), 3, optimizer, known=False),
        "in-batch": case(in_batch, 2, optimizer),
        "in-batch, of selected": case(partial(in_batch, selected=True), 2, optimizer, known=False),
    }
    assert compared(ranks, cases, "ddp", SHARD, **CLOSE) == []


def test_rows_of_the_weight_by_index_are_refused_with_the_call_that_looks_them_up() -> None:
    styles = {
        "index": lambda model, batch: model.item_emb.weight[batch["shared"]].sum(),
        "functional": lambda model, batch: F.embedding(batch["shared"], model.item_emb.weight).sum(),
        "logits": lambda model, batch: (model.states_of(batch) @ model.item_emb.weight.T)[..., batch["shared"]].sum(),
    }
    error = ["RuntimeError", "item_emb.weight", "item_emb(ids)"]
    cases = {name: Case(lambda each=each: Sampled(each), _loader, error=error, steps=0) for name, each in styles.items()}
    assert not_refused(2, cases, SHARD) == []
