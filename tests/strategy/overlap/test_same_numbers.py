"""What a Trainer can do, with the exchange overlapped and without: bit by bit the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers import overlap_training as training
from tests.helpers.overlap_modules import with_tags
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    NEVER,
    STEPS,
    CountingModel,
    Run,
    Stream,
    as_record,
    as_tensors,
    as_tuple,
    assert_bitwise,
    assert_same,
    changed_loader,
    fit,
    my_loader,
    notices,
    strategies,
)

UNKNOWN = "cannot be known ahead"


class DataWithHooks(L.LightningDataModule):
    """Changes the ids on their way."""

    def train_dataloader(self) -> DataLoader:
        return changed_loader(STEPS, as_tensors)

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        return {**batch, "ids": (batch["ids"] + 5) % 13}


def _plain() -> DataLoader:
    return my_loader(STEPS)


def _tensors() -> DataLoader:
    return changed_loader(STEPS, as_tensors)


@dataclass
class Case:
    """One way to train.

    Attributes:
        ahead: lookups that were predicted, not predicted, and mispredicted.
        said: part of a warning that comes once, from one rank.
        trial_runs: whether trial runs are asked for.
    """

    module: Callable[..., CountingModel] = CountingModel
    loader: Callable[[], Any] = _plain
    ahead: tuple[int, int, int] = KNOWN
    options: dict[str, Any] = field(default_factory=dict)
    validates: bool = False
    said: str = ""
    trial_runs: bool = False


CASES = {
    "validation in the middle": Case(options={"val_check_interval": 2}, validates=True),
    "a learning rate for every step": Case(modules.Schedules),
    "bf16-mixed": Case(options={"precision": "bf16-mixed"}),
    "two collections": Case(modules.TwoCollections, lambda: changed_loader(STEPS, with_tags), (2 * KNOWN[0], 2 * KNOWN[1], 0)),
    "batches are data classes": Case(modules.OfRecords, lambda: changed_loader(STEPS, as_record)),
    "batches are tuples": Case(modules.OfTuples, lambda: changed_loader(STEPS, as_tuple)),
    "ids of tensors in the batch": Case(modules.OfTensors, _tensors),
    "ids that are computed": Case(modules.Computes, _tensors, NEVER, said=UNKNOWN),
    "ids that are computed, trial runs": Case(modules.Computes, _tensors, trial_runs=True),
    "ids that are computed, bf16-mixed": Case(modules.Computes, _tensors, options={"precision": "bf16-mixed"}, trial_runs=True),
    "ids that are rewritten through numpy": Case(modules.RewritesThroughNumpy, _tensors, (0, 8, 4), said=UNKNOWN),
    "a loader with one buffer": Case(modules.OfTensors, training.OneBuffer),
    "ids that are drawn": Case(modules.Draws, _tensors, NEVER, said=UNKNOWN),
    "ids that are drawn, trial runs": Case(modules.Draws, _tensors, trial_runs=True),
    "draws that nobody foresees": Case(modules.DrawsUnforeseen, _tensors, (0, 8, 4), said=UNKNOWN, trial_runs=True),
    "hooks that change the batch in place": Case(modules.ChangesInPlace, _tensors, (0, 8, 4), said=UNKNOWN),
    "hooks that change the batch in place, trial runs": Case(modules.ChangesInPlace, _tensors, (5, 3, 4), trial_runs=True),
    "hooks of the data module": Case(modules.OfTensors, DataWithHooks, (0, 8, 4), said=UNKNOWN),
    "hooks of the data module, trial runs": Case(modules.OfTensors, DataWithHooks, (5, 3, 4), trial_runs=True),
    "a limit of batches": Case(options={"limit_train_batches": STEPS - 2}, ahead=(KNOWN[0] - 4, KNOWN[1], 0)),
    "a loader for every epoch": Case(options={"reload_dataloaders_every_n_epochs": 1}),
    "a stream": Case(loader=lambda: DataLoader(Stream(), batch_size=None)),
    "workers": Case(loader=lambda: DataLoader(_plain().dataset, batch_size=None, num_workers=2)),
    "several loaders": Case(
        modules.OfSeveralLoaders, lambda: {"main": _plain(), "other": my_loader(3)}, NEVER, said="use one DataLoader"
    ),
    "a step that takes the iterator": Case(modules.Iterates, ahead=NEVER, said=UNKNOWN),
    "a step that takes the iterator, trial runs": Case(modules.Iterates, ahead=NEVER, said=UNKNOWN, trial_runs=True),
    "a closure called before the step": Case(modules.StepsAfterClosure),
    "epochs that are cut short": Case(modules.CutsShort, ahead=(5, 2, 1)),
    "further lookups without gradients": Case(modules.LooksUpMore, lambda: changed_loader(STEPS, with_tags), (9 + 6, 3 + 2, 0)),
    "evaluation between steps": Case(modules.Evaluates),
    "lookups with gradients between steps": Case(modules.TrainsBetween, ahead=NEVER),
    "a table that nobody trains": Case(modules.Freezes),
    "fast_dev_run": Case(options={"fast_dev_run": 3}, ahead=(1, 2, 0), validates=True),
}


def _both(case: Case) -> tuple[Run, Run]:
    runs = []
    for strategy in strategies("trial_run" if case.trial_runs else "batch"):
        torch.manual_seed(0)
        validation = my_loader(2) if case.validates else None
        options = {"max_epochs": EPOCHS, "strategy": strategy, **case.options}
        runs.append(fit(case.module(), case.loader(), validation, **options))
    return runs[0], runs[1]


FAST = ["validation in the middle", "two collections", "ids of tensors in the batch", "a stream"]
FAST += ["ids that are rewritten through numpy", "a loader with one buffer"]
FAST += ["ids that are computed, trial runs", "draws that nobody foresees", "a step that takes the iterator"]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST)])
def test_bitwise(name: str) -> None:
    case = CASES[name]
    runs = run_distributed(_both, 2, case)
    assert_bitwise(runs)
    for _, overlapped in runs:
        assert overlapped.looked_ahead() == case.ahead
        told = notices(overlapped)
        assert len(told) <= 1 and not overlapped.threads
    told = [text for _, overlapped in runs for text in notices(overlapped)]
    assert bool(told) == bool(case.said) and all(case.said in text for text in told)


@pytest.mark.slow
def test_ranks_that_know_their_ids_in_different_ways() -> None:
    runs = run_distributed(_both, 3, Case(modules.DiffersByRank, _tensors, trial_runs=True))
    assert_bitwise(runs)
    ahead = [overlapped.looked_ahead() for _, overlapped in runs]
    assert ahead == [(4, 8, 0), (4, 8, 0), (0, 8, 4)], "no rank runs trials, or stops to, alone"


def _alone() -> tuple[Run, Run]:
    runs = []
    for strategy in strategies():
        torch.manual_seed(0)
        runs.append(fit(modules.Skips(), my_loader(STEPS), max_epochs=EPOCHS, strategy=strategy))
    return runs[0], runs[1]


def test_steps_without_a_loss() -> None:
    """On one rank; on several, Lightning refuses them."""
    runs = run_distributed(_alone, 1)
    assert_bitwise(runs)
    assert runs[0][1].looked_ahead() == KNOWN


def _close(name: str) -> tuple[Run, Run]:
    runs = []
    case = CASES[name]
    for strategy in (
        FreeScaleStrategy(overlap=False),
        FreeScaleStrategy(lookahead="trial_run" if case.trial_runs else "batch"),
    ):
        torch.manual_seed(0)
        runs.append(fit(case.module(), case.loader(), max_epochs=EPOCHS, strategy=strategy))
    return runs[0], runs[1]


@pytest.mark.parametrize("name", ["two collections", pytest.param("ids that are drawn, trial runs", marks=pytest.mark.slow)])
def test_each_row_once_differs_by_rounding_only(name: str) -> None:
    runs = run_distributed(_close, 2, name)
    for plain, overlapped in runs:
        assert overlapped.losses == pytest.approx(plain.losses, rel=1e-5)
        assert overlapped.statistics["rows"] < overlapped.statistics["tokens"]
    assert_same(runs[0][1].weights, runs[0][0].weights, rtol=1e-4, atol=1e-6)


def _twice(path: Path) -> list[tuple[Run, Run]]:
    """Stops in the middle of an epoch, saves on the way, trains on with another Trainer."""
    runs = []
    for index, strategy in enumerate(strategies()):
        torch.manual_seed(0)
        module = CountingModel()
        saving = L.pytorch.callbacks.ModelCheckpoint(path / str(index), every_n_train_steps=4, save_top_k=-1, save_last=True)
        options = {"callbacks": [saving], "enable_checkpointing": True}
        first = fit(module, my_loader(STEPS), max_epochs=9, max_steps=9, strategy=strategy, **options)
        module.losses = []
        runs.append((first, fit(module, my_loader(STEPS), strategy=strategies()[index])))
    return runs


@pytest.mark.slow
def test_a_fit_that_ends_in_the_middle_saves_on_the_way_and_goes_on(tmp_path: Path) -> None:
    ranks = run_distributed(_twice, 2, tmp_path)
    for part in range(2):
        assert_bitwise([(plain[part], overlapped[part]) for plain, overlapped in ranks])
    for _, (first, second) in ranks:
        assert first.looked_ahead() == (9 - 2 - 1, 2 + 1, 0)
        assert second.looked_ahead() == (STEPS - 2, 2, 0)
    saved = [sorted(path.name for path in (tmp_path / str(index)).iterdir()) for index in range(2)]
    assert saved[0] == saved[1] and len(saved[0]) == 3
    for name in saved[0]:
        plain, overlapped = (torch.load(tmp_path / str(index) / name, weights_only=False) for index in range(2))
        assert_same(overlapped["state_dict"], plain["state_dict"])
        assert_same(overlapped["optimizer_states"], plain["optimizer_states"])
