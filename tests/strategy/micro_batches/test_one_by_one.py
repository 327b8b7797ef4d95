"""Hooks, ids that are told and trial runs get micro-batches one by one, and each is known ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.balance import MicroBatches
from lightning_freescale.testing import run_distributed
from tests.helpers.micro_batch_training import Model, run
from tests.helpers.recommender import CATEGORIES


def _predicted() -> Any:
    return run(4, FreeScaleStrategy(), Model)["statistics"]


def test_every_micro_batch_is_known_ahead() -> None:
    for counted in run_distributed(_predicted, 2):
        # nothing is known before the first step, nor of the first micro-batch of an epoch
        assert counted["unpredicted_lookups"] == 3
        assert counted["mispredicted_lookups"] == 0


class HooksAndIds(Model):
    """Moves the batch by itself, and tells ids of batches as they come out of the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        return {"moved": batch}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        return batch["moved"]

    def embedding_ids(self, batch: Any) -> Any:
        self.told += 1
        return batch["features"]


class HooksInPlace(HooksAndIds):
    """Changes the very batches that come out of the loader, on their way and when their step begins."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        moved = dict(batch)
        batch.clear()
        batch["moved"] = moved
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in batch.batches if isinstance(batch, MicroBatches) else [batch]:
            part["label"] += 1  # of the tensor that the loader has made

    def embedding_ids(self, batch: Any) -> Any:
        assert "moved" not in batch and float(batch["label"].max()) < 1, "it is asked before hooks change the batch"
        return super().embedding_ids(batch)


def _hooks(make: Any) -> Any:
    made = []
    found = run(3, FreeScaleStrategy(), lambda: made.append(make()) or made[0])
    return found["statistics"], made[0].told, len(made[0].seen)


@pytest.mark.parametrize("make", [HooksAndIds, HooksInPlace])
def test_hooks_and_told_ids_see_micro_batches_one_by_one(make: Any) -> None:
    for counted, told, parts in run_distributed(_hooks, 2, make):
        assert counted["unpredicted_lookups"] == 2, "the first of each epoch"
        assert counted["mispredicted_lookups"] == 0
        assert told == parts - 2, "it is asked once for each other one"


class ComputesIds(Model):
    """Makes its ids in the step, of a batch that a hook changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts: list[int] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["shift"] = batch.get("shift", 0) + 1
        return batch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.shifts.append(batch["shift"])
        given = batch["features"]
        ids = (5 * given.values() + batch["shift"]) % CATEGORIES
        computed = KeyedJaggedTensor(given.keys(), ids, lengths=given.lengths())
        return super().training_step({**batch, "features": computed}, batch_idx)


def _computes_ids() -> Any:
    made = []
    found = run(3, FreeScaleStrategy(lookahead="trial_run"), lambda: made.append(ComputesIds()) or made[0])
    return found["statistics"], made[0].shifts


def test_a_trial_run_gets_the_micro_batch_that_the_step_will_get() -> None:
    for counted, shifts in run_distributed(_computes_ids, 2):
        assert set(shifts) == {1}
        assert counted["mispredicted_lookups"] == 0
        assert counted["predicted_lookups"] > counted["unpredicted_lookups"]
