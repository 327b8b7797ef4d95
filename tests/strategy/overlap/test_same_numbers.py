"""A Trainer has bitwise the same results with the overlapped exchange and with that of TorchRec."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from tests.helpers import overlap_modules as modules
from tests.helpers import overlap_training as training
from tests.helpers.jagged import copy_of
from tests.helpers.overlap_modules import with_tags
from tests.helpers.overlap_training import GIVEN, KNOWN, NEVER, PLAIN, STEPS, Batch, Case, changed_loader, compared, my_loader
from tests.helpers.recommender import FEATURES, ITEMS

UNKNOWN = "net.embeddings"  # is named in the notice
WRONG = (0, 8, 4)
OVERLAPPED = {"dedup": False}


class DataWithHooks(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return changed_loader(STEPS, training.as_tensors)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "ids": (batch["ids"] + 5) % 13}


class AsksInSetup(training.CountingModel):
    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


class MakesItsTablesLate(AsksInSetup):
    """Asks for the tables before they exist."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.later = nn.Identity(), [self.net]  # no submodule

    def configure_model(self) -> None:
        self.net = self.later[0]


def tensors(make: Any, ahead: Any = KNOWN, overlap: Any = None, **rest: Any) -> Case:
    """Return a case with a module that creates its KeyedJaggedTensor in the step."""
    return Case(make, lambda: changed_loader(STEPS, training.as_tensors), ahead=ahead, overlap=overlap or {}, **rest)


def two_tables(make: Any, ahead: Any, **rest: Any) -> Case:
    return Case(make, lambda: changed_loader(STEPS, with_tags), ahead=ahead, **rest)


def stream() -> DataLoader:
    return DataLoader(training.Stream(), batch_size=None)


TRAINER = {
    "validation in the middle": Case(options={"val_check_interval": 2}, validation=lambda: my_loader(2), ahead=KNOWN),
    "a learning rate for every step": Case(modules.Schedules, ahead=KNOWN),
    "a limit of batches": Case(options={"limit_train_batches": STEPS - 2}, ahead=(KNOWN[0] - 4, KNOWN[1], 0)),
    "an end in the middle of an epoch": Case(options={"max_epochs": 9, "max_steps": 9}, ahead=(9 - 2 - 1, 2 + 1, 0)),
    "a loader for every epoch": Case(options={"reload_dataloaders_every_n_epochs": 1}, ahead=KNOWN),
    "fast_dev_run": Case(options={"fast_dev_run": 3}, ahead=(1, 2, 0), validation=lambda: my_loader(2)),
    "a closure called before the step": Case(modules.StepsAfterClosure, ahead=KNOWN),
    "epochs that are cut short": Case(modules.CutsShort, ahead=(5, 2, 1)),
    "evaluation between steps": Case(modules.Evaluates, ahead=KNOWN),
    "lookups with gradients between steps": Case(lambda: modules.Evaluates(gradients=True), ahead=KNOWN),
    "a table that is not trained": Case(modules.Freezes, ahead=KNOWN),
    "two collections": two_tables(modules.TwoCollections, (2 * KNOWN[0], 2 * KNOWN[1], 0)),
    "further lookups without gradients": two_tables(modules.LooksUpMore, (9 + 6, 3 + 2, 0)),
}
LOADERS = {
    "batches are data classes": Case(modules.OfRecords, lambda: changed_loader(STEPS, training.as_record), ahead=KNOWN),
    "one buffer": Case(modules.OfTensors, training.OneBuffer, ahead=KNOWN),
    "a stream": Case(loader=stream, ahead=KNOWN),
    "workers": Case(
        loader=lambda: DataLoader(my_loader(STEPS).dataset, batch_size=None, num_workers=2),
        ahead=KNOWN,
    ),
    "several": Case(
        modules.OfSeveralLoaders,
        lambda: {"main": my_loader(STEPS), "other": my_loader(3)},
        ahead=NEVER,
        notice="DataLoader",
    ),
    "the step takes the iterator": Case(modules.Iterates, ahead=NEVER, notice=UNKNOWN),
    "made in configure_optimizers": Case(modules.AsksEarly, ahead=KNOWN),
    "a stream, made in setup": Case(AsksInSetup, stream, ahead=KNOWN),
    "made before the tables": Case(MakesItsTablesLate, notice="configure_optimizers"),
}
IDS = {
    "tensors in the batch": tensors(modules.OfTensors),
    "computed": tensors(modules.Computes, NEVER, notice=UNKNOWN),
    "rewritten through numpy": tensors(modules.RewritesThroughNumpy, WRONG, notice=UNKNOWN),
    "drawn": tensors(modules.Draws, NEVER, notice=UNKNOWN),
    "changed in place by hooks": tensors(modules.ChangesInPlace, WRONG, notice=UNKNOWN),
    "changed by the data module": Case(modules.OfTensors, DataWithHooks, ahead=WRONG, notice=UNKNOWN),
}


# -- ids that a function of the user returns


def computed_ids(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, modules.Computes.ids(None, batch), lengths=batch["lengths"])


def wrong_ids(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, (batch["ids"] + 1) % 13, lengths=batch["lengths"])


def wrong_on_one(batch: Batch) -> KeyedJaggedTensor:
    return wrong_ids(batch) if os.environ["RANK"] == "1" else computed_ids(batch)


def beyond_the_table(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, batch["ids"] + ITEMS, lengths=batch["lengths"])


def only_items(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": batch["features"]}


class HasAMethod(modules.Computes):
    """Copies the batch in a hook, and marks the copy."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "marked": True}

    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        assert "marked" not in batch, "it is asked before hooks change the batch"
        return computed_ids(batch)


class HasAnAttribute(training.CountingModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_ids = nn.Identity()


class KnownInTheBatch(modules.TwoCollections):
    """Creates the ids of one collection in the step; the batch contains those of the other."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "features": copy_of(batch["features"])}, batch_idx)


def by_function(function: Any, make: Any = modules.Computes, ahead: Any = GIVEN, **rest: Any) -> Case:
    return tensors(make, ahead, {"ids_of": function}, **rest)


FUNCTIONS = {
    "a function": by_function(computed_ids),
    "a method": tensors(HasAMethod, GIVEN),
    "an attribute that is no method": Case(HasAnAttribute, ahead=KNOWN),
    "wrong ids": by_function(wrong_ids, ahead=WRONG, notice="ids_of=wrong_ids"),
    "ids beyond the table": by_function(beyond_the_table, ahead=WRONG, notice="ids_of=beyond_the_table"),
    "what it leaves out": two_tables(
        KnownInTheBatch, (GIVEN[0] + KNOWN[0], GIVEN[1] + KNOWN[1], 0), overlap={"ids_of": only_items}
    ),
}


THREE_RANKS = {
    "ranks that know their ids in different ways": tensors(modules.DiffersByRank, [(1, 11, 0), NEVER, NEVER], notice=UNKNOWN),
    "wrong ids on one rank": by_function(wrong_on_one, ahead=[(5, 7, 0), WRONG, (5, 7, 0)], notice="ids_of=wrong_on_one"),
}
# Lightning refuses them on several ranks
ONE_RANK = {"steps without a loss": Case(modules.Skips, ahead=KNOWN)}

IN_TIER_2 = {"a learning rate for every step", "a limit of batches", "fast_dev_run", "a closure called before the step"}
IN_TIER_2 |= {"evaluation between steps", "a table that is not trained", "workers", "made in configure_optimizers"}
IN_TIER_2 |= {"drawn", "changed by the data module", "batches are data classes", "a loader for every epoch", "two collections"}


def _first(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: case for name, case in cases.items() if name not in IN_TIER_2}


LATER = {name: case for name, case in {**TRAINER, **LOADERS, **IDS}.items() if name in IN_TIER_2}
TABLES = [(2, _first(TRAINER)), (2, _first(LOADERS)), (2, _first(IDS)), (2, FUNCTIONS), (1, ONE_RANK)]
TIER_2 = [(2, LATER), (3, THREE_RANKS)]


@pytest.mark.parametrize(("ranks", "cases"), [*TABLES, *(pytest.param(*each, marks=pytest.mark.slow) for each in TIER_2)])
def test_bitwise_as_torchrec(ranks: int, cases: dict[str, Case]) -> None:
    assert compared(ranks, cases, PLAIN, OVERLAPPED) == []


# -- refused


def wrong_type(batch: Batch) -> Any:
    return batch["ids"]


def broken(batch: Batch) -> Any:
    return batch["no such key"]


REFUSED = {
    "type": by_function(wrong_type, error=["TypeError", "ids_of=wrong_type)", "Tensor", "'net.embeddings'"]),
    "its own error": by_function(broken, error=["KeyError", "no such key", "ids_of=broken"]),
}


def test_wrong_functions_are_an_error_on_every_rank() -> None:
    assert training.not_refused(2, REFUSED) == []
