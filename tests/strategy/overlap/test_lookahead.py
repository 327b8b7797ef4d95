"""By default nothing of the user runs twice; a trial run is asked for, and what nobody knows is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers.jagged import copy_of
from tests.helpers.overlap_modules import with_tags
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    NEVER,
    STEPS,
    Batch,
    CountingModel,
    Run,
    against_plain,
    as_tensors,
    assert_bitwise,
    fit_overlapped,
    notices,
)
from tests.helpers.recommender import DIM

CALLS: list[int] = []


class Notes(modules.Computes):
    """Writes down every call outside of itself, where nothing can take it back; its ids stand nowhere in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        CALLS.append(batch_idx)
        return super().training_step(batch, batch_idx)


class NotesKnown(modules.OfTensors):
    """The same with ids in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        CALLS.append(batch_idx)
        return super().training_step(batch, batch_idx)


def _calls(make: Callable[[], CountingModel], **options: Any) -> tuple[list[int], Run]:
    CALLS.clear()
    run = fit_overlapped(make, as_tensors, **options)
    return list(CALLS), run


@pytest.mark.parametrize("make", [Notes, NotesKnown])
def test_by_default_training_step_runs_once_a_step(make: Callable[[], CountingModel]) -> None:
    for calls, run in run_distributed(_calls, 2, make):
        assert calls == list(range(STEPS)) * EPOCHS
        assert run.looked_ahead() == (NEVER if make is Notes else KNOWN)


def test_a_trial_run_is_asked_for() -> None:
    for calls, run in run_distributed(_calls, 2, Notes, lookahead="trial_run"):
        assert len(calls) > STEPS * EPOCHS
        assert run.looked_ahead() == KNOWN and not notices(run)


class Moves(modules.Computes):
    """Moves a second set of weights along before it looks up, through ``.data``, which nothing notices."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(DIM, 1).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.slow.weight.data.mul_(0.9).add_(0.01)
        return super().training_step(batch, batch_idx) * (1 + self.slow.weight.detach().sum())


def test_state_that_no_trial_run_could_put_back_is_as_without_overlap() -> None:
    assert_bitwise(run_distributed(against_plain, 2, Moves, as_tensors))


def test_one_notice_of_all_that_nobody_knows() -> None:
    ranks = run_distributed(against_plain, 2, modules.Computes, as_tensors)
    assert_bitwise(ranks)
    told = [text for _, run in ranks for text in notices(run)]
    assert len(told) == 1, "one of all ranks says so"
    for part in (
        "'net.embeddings'",
        "do not stand in the batch",
        "KeyedJaggedTensor into the batch",
        "ids_of=",
        "embedding_ids",
    ):
        assert part in told[0]
    assert "FreeScaleStrategy(lookahead='trial_run')" in told[0]


class OfLists(modules.TwoCollections):
    """Makes both KeyedJaggedTensors in the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        made = {"features": copy_of(batch["features"]), "tags": copy_of(batch["tags"]), "label": batch["label"]}
        return super().training_step(made, batch_idx)


def test_one_notice_of_several_collections() -> None:
    ranks = run_distributed(against_plain, 2, OfLists, with_tags)
    assert_bitwise(ranks)
    (told,) = [text for _, run in ranks for text in notices(run)]
    assert "'net.embeddings'" in told and "'tags'" in told


def test_ranks_agree_with_the_one_that_knows_least() -> None:
    ranks = run_distributed(against_plain, 3, modules.DiffersByRank, as_tensors)
    assert_bitwise(ranks)
    assert [run.looked_ahead() for _, run in ranks] == [(1, 11, 0), NEVER, NEVER]
    (told,) = [text for _, run in ranks for text in notices(run)]
    assert "another rank does not know them" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": "dry_run"}, r"lookahead='dry_run'\): pass 'batch' or 'trial_run'"),
        ({"lookahead": "trial_run", "overlap": False}, "overlap=False, lookahead='trial_run'"),
        ({"ids_of": dict, "overlap": False}, "overlap=False, ids_of=..."),
        ({"split_backward": True, "overlap": False}, "overlap=False, split_backward=True"),
        ({"ids_of": dict, "lookahead": "trial_run"}, "lookahead='trial_run', ids_of=..."),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeScaleStrategy(**options)


def test_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ids_of='ids'.*pass a function"):
        FreeScaleStrategy(ids_of="ids")
