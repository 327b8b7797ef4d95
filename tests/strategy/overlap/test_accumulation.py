"""Gradients of several batches in one optimizer step, as under "ddp"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers.overlap_training import CountingModel, Run, as_tensors, assert_same, changed_loader, fit, my_loader
from tests.helpers.recommender import DIM, ITEMS, OPTIMIZERS

STEPS = 7  # the last window of an epoch is shorter


def _three(make: Any, loader: Any, lookahead: str = "batch", **options: Any) -> list[Run]:
    """Under "ddp", and under "freescale" with and without dedup."""
    runs = []
    for strategy in ("ddp", *(FreeScaleStrategy(dedup=dedup, lookahead=lookahead) for dedup in (True, False))):
        torch.manual_seed(0)
        chosen = {name: option() if callable(option) else option for name, option in options.items()}
        runs.append(fit(make(), loader(), max_epochs=2, strategy=strategy, **chosen))
    return runs


def _every_optimizer(**options: Any) -> list[list[Run]]:
    return [_three(lambda name=name: CountingModel(name), lambda: my_loader(STEPS), **options) for name in OPTIMIZERS]


def _assert_as_ddp(ranks: list[list[Run]]) -> None:
    for ddp, *mine in ranks:
        for run in mine:
            assert run.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert max(ddp.losses) / min(ddp.losses) > 1.2, "the loss must move, or equality means nothing"
    ddp, *mine = ranks[0]
    for run in mine:
        assert_same(run.weights, ddp.weights, rtol=1e-4, atol=1e-6)
        states = [{k: v for k, v in state["state"].items() if v} for state in (run.states[0], ddp.states[0])]
        assert_same(states[0], states[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        pytest.param({"accumulate_grad_batches": 3, "limit_train_batches": 5}, marks=pytest.mark.slow),
        pytest.param({"callbacks": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]}, marks=pytest.mark.slow),
    ],
)
def test_as_under_ddp(options: dict[str, Any]) -> None:
    ranks = run_distributed(_every_optimizer, 2, **options)
    for index in range(len(OPTIMIZERS)):
        _assert_as_ddp([runs[index] for runs in ranks])
    for runs in ranks:
        for _, *mine in runs:
            for run in mine:
                predicted, unpredicted, mispredicted = run.looked_ahead()
                assert (unpredicted, mispredicted) == (3, 0) and predicted == len(run.losses) - 3


class SchedulesAndComputes(modules.Schedules, modules.Computes):
    """A learning rate for every step, and ids that a trial run tells."""


def _with_much_in_between() -> list[Run]:
    return _three(
        lambda: SchedulesAndComputes("adagrad"),
        lambda: changed_loader(STEPS, as_tensors),
        lookahead="trial_run",
        accumulate_grad_batches=3,
        reload_dataloaders_every_n_epochs=1,
    )


@pytest.mark.slow
def test_with_schedule_and_trial_runs() -> None:
    ranks = run_distributed(_with_much_in_between, 2)
    _assert_as_ddp(ranks)
    assert all(run.looked_ahead() == (2 * STEPS - 3, 3, 0) for _, *mine in ranks for run in mine)


def _validating() -> list[Run]:
    runs = []
    for strategy in ("ddp", "freescale"):
        torch.manual_seed(0)
        options = {"accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 2, "strategy": strategy}
        runs.append(fit(CountingModel("adagrad"), my_loader(STEPS), my_loader(2), **options))
    return runs


def test_validation_inside_a_window() -> None:
    _assert_as_ddp(run_distributed(_validating, 2))


def _cut_short() -> list[Run]:
    return _three(lambda: modules.CutsShort("adagrad"), lambda: my_loader(STEPS), accumulate_grad_batches=3)


def test_a_window_that_its_epoch_cuts_short() -> None:
    """Lightning forgets the gradients that wait for a step then."""
    _assert_as_ddp(run_distributed(_cut_short, 2))


class WeightedMean(CountingModel):
    """Bags that only TorchRec pools."""

    def __init__(self) -> None:
        super().__init__("sgd")
        config = EmbeddingBagConfig(name="bag", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history"])
        config.pooling = PoolingType.MEAN
        self.bags = EmbeddingBagCollection(tables=[config], is_weighted=True)


def _refused(make: Any, **options: Any) -> str:
    try:
        fit(make(), my_loader(4), **options)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (WeightedMean, {}, r"Trainer(accumulate_grad_batches=2): collections ['bags'] are updated during backward"),
        (
            CountingModel,
            {"strategy": FreeScaleStrategy(overlap=False)},
            "collections ['net.embeddings'] are updated during backward",
        ),
        (
            CountingModel,
            {
                "strategy": FreeScaleStrategy(overlap=False),
                "accumulate_grad_batches": 1,
                "callbacks": [GradientAccumulationScheduler({1: 2})],
            },
            "GradientAccumulationScheduler: collections ['net.embeddings']",
        ),
    ],
)
def test_refused_where_tables_are_updated_in_backward(make: Any, options: dict[str, Any], message: str) -> None:
    for told in run_distributed(_refused, 2, make, **{"accumulate_grad_batches": 2, **options}):
        assert message in told


class SkipsSteps(CountingModel):
    """Accumulates by hand."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure)
        else:
            closure()


def test_refused_if_done_by_hand() -> None:
    for told in run_distributed(_refused, 2, SkipsSteps):
        assert "a second backward without an optimizer step between" in told
