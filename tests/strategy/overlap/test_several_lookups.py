"""A table that is looked up several times in a step has one update, as that of the unsharded module."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import several_lookups
from tests.helpers.overlap_training import Run, assert_same
from tests.helpers.recommender import trainer
from tests.helpers.several_lookups import KINDS, loader

STEPS, EPOCHS = 9, 2


def _fit(kind: str, optimizer: str, sharded: bool, window: int = 1, **options: Any) -> Run:
    common: dict[str, Any] = {"find_unused_parameters": True}
    if sharded:
        strategy: Any = FreeScaleStrategy(**common, **options)
    else:
        strategy, optimizer = DDPStrategy(**common), "lazy_adam" if optimizer == "adam" else optimizer
    module = getattr(several_lookups, kind)(optimizer)
    fitting = trainer(
        strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), max_epochs=EPOCHS, accumulate_grad_batches=window
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, loader(int(os.environ["RANK"]), STEPS))
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    told = [str(one.message) for one in caught]
    return Run(module.losses, state["state_dict"], [s["state"] for s in state["optimizer_states"]], module.statistics, told)


def _assert_like_unsharded(ranks: int, kind: str, optimizer: str, **options: Any) -> list[Run]:
    window = options.get("window", 1)
    unsharded = run_distributed(_fit, ranks, kind, optimizer, False, window=window)
    sharded = run_distributed(_fit, ranks, kind, optimizer, True, **options)
    for mine, theirs in zip(sharded, unsharded):
        assert len(set(theirs.losses)) > STEPS, "the loss must move, or equality means nothing"
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-7)
    assert_same(sharded[0].weights, unsharded[0].weights, rtol=1e-5, atol=1e-6)
    steps = [
        {name: float(each["step"]) for name, each in run.states[0].items() if "step" in each}
        for run in (sharded[0], unsharded[0])
    ]
    assert steps[0] == steps[1], "updates of each parameter"
    return sharded


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_update_as_in_the_unsharded_module(kind: str, optimizer: str) -> None:
    _assert_like_unsharded(2, kind, optimizer)


@pytest.mark.parametrize("kind", ["ThreeLookups", "Drawn"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_other_optimizers(kind: str, optimizer: str) -> None:
    _assert_like_unsharded(3, kind, optimizer, dedup=False)


@pytest.mark.parametrize("kind", ["ThreeLookups", "Conditional", "Drawn", "OnSomeRanks", "Detaches"])
def test_windows_of_two_batches(kind: str) -> None:
    _assert_like_unsharded(2, kind, "adagrad", window=2)


def _counts(run: Run) -> tuple[int, int, int]:
    names = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups")
    predicted, unpredicted, mispredicted = (int(run.statistics[name]) for name in names)
    return predicted, unpredicted, mispredicted


def test_all_lookups_are_known_ahead() -> None:
    """Where they stand is learned in the first step, and the first of an epoch has none before it."""
    for run in _assert_like_unsharded(2, "ThreeLookups", "adagrad"):
        assert _counts(run) == (3 * (STEPS * EPOCHS - EPOCHS - 1), 3 * (EPOCHS + 1), 0)
        assert not [text for text in run.warnings if "lookup" in text or "overlapped" in text]


def test_lookups_that_come_later_are_known_from_then_on() -> None:
    for run in _assert_like_unsharded(2, "Conditional", "adagrad"):
        in_time, not_in_time = STEPS * EPOCHS - EPOCHS - 1, EPOCHS + 1
        later = [step for step in range(STEPS) if step and step % 3 == 0]  # the first of them was not foreseen
        assert _counts(run) == (2 * in_time + len(later) * EPOCHS - 1, 2 * not_in_time, 1)


def test_a_trial_run_finds_all_of_them() -> None:
    for run in _assert_like_unsharded(2, "Drawn", "adagrad", lookahead="trial_run"):
        predicted, _, _ = _counts(run)
        assert predicted == 3 * (STEPS * EPOCHS - EPOCHS - 1)


def _known_ids(batch: Any) -> Any:
    return [batch["history"], batch["positive"], batch["negative"]]


def test_a_function_tells_all_of_them() -> None:
    for run in _assert_like_unsharded(2, "ThreeLookups", "adagrad", ids_of=_known_ids):
        assert _counts(run) == (3 * (STEPS * EPOCHS - EPOCHS), 3 * EPOCHS, 0)


def _error(kind: str) -> str:
    try:
        _fit(kind, "adagrad", True)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_later_lookup_that_is_wrong_is_an_error_of_every_rank() -> None:
    for told in run_distributed(_error, 2, "WrongLater"):
        assert "rank 1: feature 'item' holds id" in told
        assert "rank 0" not in told
