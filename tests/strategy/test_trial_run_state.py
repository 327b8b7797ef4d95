"""Whatever state a training_step changes before it looks up ids: a trial run is exact, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.changing_states import CASES, EXACT, NOTES, REFUSED, Noting, Shared, Stateful
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    STEPS,
    Run,
    as_tensors,
    assert_bitwise,
    changed_loader,
    fit,
    notices,
)


@dataclass
class Outcome:
    """What a fit leaves behind, and what the step has used and logged."""

    run: Run
    used: list[float]
    logged: list[Any]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _fit(names: tuple[str, ...], **options: Any) -> Outcome:
    NOTES.write_text("")
    Path("array.txt").unlink(missing_ok=True)
    Stateful.history.clear()
    Shared.count = 0
    Shared.rows.clear()
    torch.manual_seed(0)
    model, logger = Stateful(*names), Noting()
    strategy = FreeScaleStrategy(**{"dedup": False, **options})
    run = fit(model, changed_loader(STEPS, as_tensors), max_epochs=EPOCHS, strategy=strategy, logger=[logger])
    return Outcome(run, model.used, logger.got)


def _against_plain(*names: str, **options: Any) -> tuple[Outcome, Outcome]:
    return _fit(names, overlap=False), _fit(names, **options)


def _assert_exact(ranks: list[tuple[Outcome, Outcome]]) -> None:
    assert_bitwise([(plain.run, other.run) for plain, other in ranks])
    for plain, other in ranks:
        assert (plain.used, plain.logged) == (other.used, other.logged)


@pytest.mark.parametrize("name", EXACT)
def test_a_trial_run_is_exact(name: str) -> None:
    ranks = run_distributed(_against_plain, 1, name, lookahead="trial_run")
    _assert_exact(ranks)
    ((_, outcome),) = ranks
    if name == "end of training":
        assert len(outcome.used) == STEPS + 3
        return
    assert len(outcome.used) == STEPS * EPOCHS
    assert outcome.run.looked_ahead()[0] > STEPS and not notices(outcome.run)
    if "parameter" not in name:  # the optimizer moves those between trial run and step
        assert outcome.run.looked_ahead() == KNOWN, "the trial run sees the state that its step will see"
    if name == "logger":
        assert len(outcome.logged) == 2 * STEPS * EPOCHS
    else:
        assert len(set(outcome.used)) > 2, "the state moves, or equality means nothing"


@pytest.mark.parametrize("names", [EXACT, REFUSED])
def test_by_default_nothing_is_done_twice(names: list[str]) -> None:
    ranks = run_distributed(_against_plain, 1, *names)
    _assert_exact(ranks)
    assert ranks[0][1].run.looked_ahead()[0] == 0


def _told(*names: str) -> str:
    try:
        _fit(names, lookahead="trial_run")
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_a_trial_run_that_cannot_be_exact_is_refused(name: str) -> None:
    (told,) = run_distributed(_told, 1, name)
    assert told.startswith("FreeScaleStrategy(lookahead='trial_run'): a trial run of training_step would leave a trace")
    for part in (CASES[name].refused, "KeyedJaggedTensor into the batch", "ids_of=", "embedding_ids(batch)"):
        assert part in told, told


def test_all_of_it_on_two_ranks() -> None:
    names = [name for name in EXACT if name not in ("end of training", "class attribute of the module")]
    _assert_exact(run_distributed(_against_plain, 2, *names, lookahead="trial_run"))


def test_every_rank_is_told() -> None:
    for told in run_distributed(_told, 2, "sampler", "iterator"):
        assert "self.states[1], of type list_iterator" in told
