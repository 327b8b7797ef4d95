"""A table with several lookups in a step, as in SASRec, has one update, as in the unsharded module."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from random_model import lazily

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import Batch, Case, CountingModel, departures, fit_all, not_refused

ITEMS, DIM, SAMPLES, LENGTH = 40, 4, 6, 5
STEPS, EPOCHS = 9, 2
DDP, UNUSED = "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
CLOSE = {"losses": (1e-5, 1e-7), "weights": (1e-5, 1e-6)}
IN_TIME, NOT_IN_TIME = STEPS * EPOCHS - EPOCHS - 1, EPOCHS + 1
"""The first step learns where the ids are, and the first step of an epoch has none before it."""


def _loader() -> DataLoader:
    """Return histories of this rank, with a positive and a negative item for each of their items."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
        lengths = torch.randint(0, LENGTH, (SAMPLES,), generator=draw)
        names = ("history", "positive", "negative")
        ids = {name: torch.randint(0, ITEMS, (int(lengths.sum()),), generator=draw) for name in names}
        found.append({**{name: _jagged(each, lengths) for name, each in ids.items()}, "label": torch.rand(1, generator=draw)})
    return DataLoader(found, batch_size=None)


def _jagged(ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths.clone())


class ThreeLookups(CountingModel):
    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        config = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])
        self.net, self.items, self.query = nn.Identity(), EmbeddingCollection(tables=[config]), nn.Linear(DIM, DIM, bias=False)
        self.items.embeddings["item"].weight.data.normal_(0, 0.5)

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.items(ids)["item"].values()

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.query(self.look_up(batch["history"])))
        scores = (hidden * self.look_up(batch["positive"])).sum(dim=1)
        loss = nn.functional.softplus(-scores).sum() + batch["label"].sum()
        negative = self.negatives(batch, batch_idx)
        if negative is not None:
            loss = loss + nn.functional.softplus((hidden * self.look_up(negative)).sum(dim=1)).sum()
        return self.kept(loss / SAMPLES)

    def kept(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        kinds = {"sgd": (torch.optim.SGD, 0.1), "adagrad": (torch.optim.Adagrad, 0.05), "adam": (torch.optim.Adam, 0.02)}
        kind, rate = {**kinds, "rowwise_adagrad": (RowWiseAdagrad, 0.05)}[self.optimizer]
        if self.optimizer == "adam" and not isinstance(self.trainer.strategy, FreeScaleStrategy):
            kind = lazily(kind)
            kind.tables = [weight for weight in self.parameters() if weight.shape == (ITEMS, DIM)]
        return kind(self.parameters(), lr=rate)


class Conditional(ThreeLookups):
    """Has negatives in every third step only, first in the fourth one."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"] if batch_idx % 3 == 0 and batch_idx else None


class Drawn(ThreeLookups):
    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        count = batch["negative"].values().numel()
        draw = torch.Generator().manual_seed(1000 + 10 * batch_idx + self.global_rank)
        return _jagged(torch.randint(0, ITEMS, (count,), generator=draw), batch["negative"].lengths())


class OnSomeRanks(ThreeLookups):
    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"] if self.global_rank == 0 and batch_idx % 2 else None


class NothingOnSomeRanks(ThreeLookups):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_rank == 0 or batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        return self.kept(self.query(batch["label"].expand(DIM)).square().mean())


class Detaches(ThreeLookups):
    """Looks up positives in odd steps without a gradient."""

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        rows = super().look_up(ids)
        return rows.detach() if self.calls % 6 == 4 else rows


class TheSameTwice(ThreeLookups):
    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        return batch["positive"]


class Checkpointed(ThreeLookups):
    """Drops the results computed from rows, and looks them up again in backward."""

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        scale = torch.ones(1, requires_grad=True)
        look_up = super().look_up
        return checkpoint(lambda factor: torch.sin(look_up(ids) * factor), scale, use_reentrant=False)


class WrongLater(Drawn):
    """Has a later lookup with an id without a row on the second rank."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        ids = super().negatives(batch, batch_idx)
        return _jagged(ids.values() + ITEMS, ids.lengths()) if self.global_rank and batch_idx == 4 else ids


KINDS = [ThreeLookups, Conditional, Drawn, OnSomeRanks, NothingOnSomeRanks, Detaches, TheSameTwice, Checkpointed]


def case(kind: Any, optimizer: str = "adagrad", ahead: Any = None, overlap: Any = None, **options: Any) -> Case:
    return Case(
        partial(kind, optimizer),
        _loader,
        options,
        {**UNUSED, **(overlap or {})},
        ahead=ahead,
        notice=None if ahead is None else "",
    )


def _updates(state: dict[int, Any]) -> dict[str, Any]:
    steps = {index: {"step": float(each["step"])} for index, each in state.items() if "step" in each}
    return {"param_groups": [], "state": steps}


def _known_ids(batch: Any) -> list[KeyedJaggedTensor]:
    return [batch["history"], batch["positive"], batch["negative"]]


LATER = sum(step and step % 3 == 0 for step in range(STEPS))  # steps of Conditional with a third lookup
WITH_ADAM = {kind.__name__: case(kind, "adam") for kind in KINDS[::2]}
WITH_ADAGRAD = {kind.__name__: case(kind) for kind in KINDS[1::2]}
SWAPPED = {kind.__name__: case(kind, "adagrad" if index % 2 == 0 else "adam") for index, kind in enumerate(KINDS)}
AHEAD = {
    "all": case(ThreeLookups, ahead=(3 * IN_TIME, 3 * NOT_IN_TIME, 0)),
    # the first of the later ones was not predicted
    "later ones from then on": case(Conditional, ahead=(2 * IN_TIME + LATER * EPOCHS - 1, 2 * NOT_IN_TIME, 1)),
    "by a function": case(ThreeLookups, ahead=(3 * (STEPS * EPOCHS - EPOCHS), 3 * EPOCHS, 0), overlap={"ids_of": _known_ids}),
}


@pytest.mark.parametrize("cases", [WITH_ADAM, WITH_ADAGRAD, AHEAD, pytest.param(SWAPPED, marks=pytest.mark.slow)])
def test_one_update_as_in_the_unsharded_module(cases: dict[str, Case]) -> None:
    """Compare only the number of updates of a parameter, because Adam's states differ for rows without updates."""
    results = run_distributed(fit_all, 2, cases, DDP, {})
    for run in (run for runs in results for pair in runs.values() for run in pair):
        run.states = [_updates(state["state"]) for state in run.states]
    assert departures(cases, results, **CLOSE) == []


def test_a_later_lookup_that_is_wrong_is_an_error_of_every_rank() -> None:
    wrong = case(WrongLater)
    wrong.error = ["ValueError", "rank 1", "feature 'item'"]
    assert not_refused(2, {"wrong": wrong}) == []
