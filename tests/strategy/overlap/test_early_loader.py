"""A training loader that Lightning makes before the strategy knows the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale.strategy.lookahead_loader import LookaheadLoader
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    STEPS,
    Batch,
    CountingModel,
    Run,
    Stream,
    assert_bitwise,
    fit,
    my_loader,
    notices,
    strategies,
)
from tests.helpers.recommender import trainer


class AsksEarly(CountingModel):
    """Asks for the number of steps, for which Lightning makes the training loader at once."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class AsksInSetup(CountingModel):
    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


class MakesItsTablesLate(AsksInSetup):
    """It has no tables yet when it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.later = nn.Identity(), [self.net]  # no submodule

    def configure_model(self) -> None:
        self.net = self.later[0]


def _early(make: Callable[[], CountingModel], stream: bool) -> tuple[Run, Run]:
    runs = []
    for strategy in strategies():
        torch.manual_seed(0)
        loader = DataLoader(Stream(), batch_size=None) if stream else my_loader(STEPS)
        runs.append(fit(make(), loader, max_epochs=EPOCHS, strategy=strategy))
    return runs[0], runs[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [AsksEarly, AsksInSetup])
def test_a_loader_that_is_made_before_the_tables(make: Callable[[], CountingModel], stream: bool) -> None:
    ranks = run_distributed(_early, 2, make, stream)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == KNOWN and not notices(run)


def test_a_loader_that_is_made_before_the_module_has_a_collection() -> None:
    ranks = run_distributed(_early, 2, MakesItsTablesLate, False)
    assert_bitwise(ranks)
    (told,) = [text for _, run in ranks for text in notices(run)]
    assert "made before the module had its embedding collections" in told and "in configure_optimizers" in told


class OfSamples(L.LightningModule):
    """No embedding collection at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.layer(batch["label"][:, None]).mean()

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _plain_module() -> bool:
    module = OfSamples()
    fitting = trainer(devices=2)
    fitting.fit(module, my_loader(2))
    return isinstance(fitting.train_dataloader, LookaheadLoader)


def test_without_collections_nothing_looks_ahead() -> None:
    assert run_distributed(_plain_module, 2) == [False, False]
