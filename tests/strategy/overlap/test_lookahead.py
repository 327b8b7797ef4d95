"""Who tells the next batch's ids: the batch, a function of the user, a trial run that was asked for, or nobody."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.strategy.lookahead_loader import LookaheadLoader
from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_training as training
from tests.helpers.overlap_training import (
    Batch,
    CountingModel,
    Run,
    as_tensors,
    assert_bitwise,
    changed_loader,
    fit,
    my_loader,
    strategies,
    with_tags,
)
from tests.helpers.recommender import DIM, FEATURES, ITEMS, trainer

STEPS, EPOCHS = 6, 2
TOLD = (STEPS * EPOCHS - EPOCHS, EPOCHS, 0)
"""Lookups that were predicted, not predicted, mispredicted: all but the first of an epoch are known."""
NEVER = (0, STEPS * EPOCHS, 0)
FROM_THE_BATCH = (STEPS * EPOCHS - EPOCHS - 1, EPOCHS + 1, 0)


def _fit(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> Run:
    torch.manual_seed(0)
    strategy = FreeScaleStrategy(**{"dedup": False, **options})
    return fit(make(), changed_loader(STEPS, change), max_epochs=EPOCHS, strategy=strategy)


def _against_plain(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> tuple[Run, Run]:
    """Plain TorchRec, and overlapped with these options."""
    return _fit(make, change, overlap=False), _fit(make, change, **options)


def _notices(run: Run) -> list[str]:
    return [text for text in run.warnings if "overlapped" in text]


# -- nothing of the user's code runs twice

CALLS: list[int] = []


class Notes(training.Computes):
    """Writes down every call outside of itself, where nothing can take it back; its ids stand nowhere in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        CALLS.append(batch_idx)
        return super().training_step(batch, batch_idx)


class NotesKnown(training.OfTensors):
    """The same with ids in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        CALLS.append(batch_idx)
        return super().training_step(batch, batch_idx)


def _calls(make: Callable[[], CountingModel], **options: Any) -> tuple[list[int], Run]:
    CALLS.clear()
    run = _fit(make, as_tensors, **options)
    return list(CALLS), run


@pytest.mark.parametrize("make", [Notes, NotesKnown])
def test_by_default_training_step_runs_once_a_step(make: Callable[[], CountingModel]) -> None:
    for calls, run in run_distributed(_calls, 2, make):
        assert calls == list(range(STEPS)) * EPOCHS
        assert run.looked_ahead() == (NEVER if make is Notes else FROM_THE_BATCH)


def test_a_trial_run_is_asked_for() -> None:
    for calls, run in run_distributed(_calls, 2, Notes, lookahead="trial_run"):
        assert len(calls) > STEPS * EPOCHS
        assert run.looked_ahead() == FROM_THE_BATCH and not _notices(run)


class Moves(training.Computes):
    """Moves a second set of weights along before it looks up, through ``.data``, which nothing notices."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(DIM, 1).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.slow.weight.data.mul_(0.9).add_(0.01)
        return super().training_step(batch, batch_idx) * (1 + self.slow.weight.detach().sum())


def test_state_that_no_trial_run_could_put_back_is_as_without_overlap() -> None:
    assert_bitwise(run_distributed(_against_plain, 2, Moves, as_tensors))


class MovesVisibly(Moves):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_a_trial_run_that_changes_a_parameter_is_an_error() -> None:
    for told in run_distributed(_error, 2, MovesVisibly, as_tensors, lookahead="trial_run"):
        assert "lookahead='trial_run'): training_step writes to a parameter" in told and "'slow.weight'" in told


# -- what nobody knows


def test_one_notice_of_all_that_nobody_knows() -> None:
    ranks = run_distributed(_against_plain, 2, training.Computes, as_tensors)
    assert_bitwise(ranks)
    told = [text for _, run in ranks for text in _notices(run)]
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


class OfLists(training.TwoCollections):
    """Makes both KeyedJaggedTensors in the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        made = {"features": _copied(batch["features"]), "tags": _copied(batch["tags"]), "label": batch["label"]}
        return super().training_step(made, batch_idx)


def _copied(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().clone(), lengths=features.lengths().clone())


def test_one_notice_of_several_collections() -> None:
    ranks = run_distributed(_against_plain, 2, OfLists, with_tags)
    assert_bitwise(ranks)
    (told,) = [text for _, run in ranks for text in _notices(run)]
    assert "'net.embeddings'" in told and "'tags'" in told


def test_ranks_agree_with_the_one_that_knows_least() -> None:
    ranks = run_distributed(_against_plain, 3, training.DiffersByRank, as_tensors)
    assert_bitwise(ranks)
    assert [run.looked_ahead() for _, run in ranks] == [(1, 11, 0), NEVER, NEVER]
    (told,) = [text for _, run in ranks for text in _notices(run)]
    assert "another rank does not know them" in told


# -- what a function of the user tells

ASKED: list[list[int]] = []


def computed_ids(batch: Batch) -> KeyedJaggedTensor:
    """What Computes looks up."""
    ASKED.append(batch["ids"].tolist())
    return KeyedJaggedTensor(FEATURES, training.Computes.ids(None, batch), lengths=batch["lengths"])


def by_path(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": computed_ids(batch)}


class Tells(training.Computes):
    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        return computed_ids(batch)


class TellsOthers(training.Computes):
    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        raise AssertionError("ids_of goes before it")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (training.Computes, {"ids_of": computed_ids}),
        (training.Computes, {"ids_of": by_path}),
        (Tells, {}),
        (TellsOthers, {"ids_of": computed_ids}),
    ],
)
def test_a_function_tells_the_ids(make: Callable[[], CountingModel], options: dict[str, Any]) -> None:
    ranks = run_distributed(_against_plain, 2, make, as_tensors, **options)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == TOLD and not _notices(run)


def _asked(**options: Any) -> tuple[list[Any], list[Any], Run]:
    ASKED.clear()
    run = _fit(training.Computes, as_tensors, ids_of=computed_ids, **options)
    return ASKED[:], [batch["ids"].tolist() for batch in changed_loader(STEPS, as_tensors)], run


def test_it_is_asked_once_for_every_batch_but_the_first_of_an_epoch() -> None:
    for asked, batches, _ in run_distributed(_asked, 2):
        assert asked == batches[1:] * EPOCHS


class ChangesOnTheWay(training.OfTensors):
    """A hook copies the batch on its way, and leaves its mark on the copy."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "marked": True}

    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        assert "marked" not in batch, "it is asked before hooks change the batch"
        return KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])


def test_it_is_given_the_batch_as_it_comes_out_of_the_loader() -> None:
    for run in run_distributed(partial(_fit, ChangesOnTheWay, as_tensors), 2):
        assert run.looked_ahead() == TOLD


def wrong_ids(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, (batch["ids"] + 1) % 13, lengths=batch["lengths"])


def test_wrong_ids_are_served_anew_and_told_once() -> None:
    ranks = run_distributed(_against_plain, 2, training.Computes, as_tensors, ids_of=wrong_ids)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == (0, 8, 4)
    (told,) = [text for _, run in ranks for text in _notices(run)]
    assert "FreeScaleStrategy(ids_of=wrong_ids) tells others than the model looks up" in told


def wrong_on_one_rank(batch: Batch) -> KeyedJaggedTensor:
    return wrong_ids(batch) if os.environ["RANK"] == "1" else computed_ids(batch)


def test_wrong_ids_of_one_rank_end_it_on_all() -> None:
    ranks = run_distributed(_against_plain, 3, training.Computes, as_tensors, ids_of=wrong_on_one_rank)
    assert_bitwise(ranks)
    assert [run.looked_ahead() for _, run in ranks] == [(5, 7, 0), (0, 8, 4), (5, 7, 0)], "the others hear of it a step later"
    (told,) = [text for _, run in ranks for text in _notices(run)]
    assert "on another rank FreeScaleStrategy(ids_of=wrong_on_one_rank) does not tell what the model looks up" in told


def beyond_the_table(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, batch["ids"] + ITEMS, lengths=batch["lengths"])


def test_ids_beyond_a_table_that_nobody_looks_up_are_wrong_ids() -> None:
    ranks = run_distributed(_against_plain, 2, training.Computes, as_tensors, ids_of=beyond_the_table)
    assert_bitwise(ranks)


class KnownInTheBatch(training.TwoCollections):
    """Makes the ids of one collection in the step; those of the other stand in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "features": _copied(batch["features"])}, batch_idx)


def only_items(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": batch["features"]}


def test_what_it_leaves_out_is_looked_for_in_the_batch() -> None:
    ranks = run_distributed(_against_plain, 2, KnownInTheBatch, with_tags, ids_of=only_items)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == tuple(a + b for a, b in zip(TOLD, FROM_THE_BATCH)) and not _notices(run)


class WithBags(training.Computes):
    """Beside it a collection that TorchRec exchanges."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="bag", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history"])
        self.bags = EmbeddingBagCollection(tables=[config])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
        return super().training_step(batch, batch_idx) + self.bags(features)["history"].mean()


def of_bags_too(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": computed_ids(batch), "bags": computed_ids(batch)}


@pytest.mark.parametrize("function", [computed_ids, of_bags_too])
def test_beside_a_collection_that_is_not_overlapped(function: Callable[[Batch], Any]) -> None:
    ranks = run_distributed(_against_plain, 2, WithBags, as_tensors, ids_of=function)
    assert_bitwise(ranks)
    assert all(run.looked_ahead() == TOLD for _, run in ranks)


def wrong_type(batch: Batch) -> Any:
    return batch["ids"]


def wrong_type_inside(batch: Batch) -> Any:
    return {"net.embeddings": batch["ids"]}


def unknown_path(batch: Batch) -> Any:
    return {"net.embedding": computed_ids(batch)}


def broken(batch: Batch) -> Any:
    return batch["no such key"]


def _error(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> str:
    try:
        _fit(make, change, **options)
    except Exception:
        return traceback.format_exc()
    return "nothing"


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (wrong_type, ["TypeError", "ids_of=wrong_type) returned a Tensor", "['net.embeddings']"]),
        (wrong_type_inside, ["TypeError", "returned a Tensor for 'net.embeddings'"]),
        (unknown_path, ["ValueError", "'net.embedding', which is no embedding collection", "['net.embeddings']"]),
        (broken, ["KeyError", 'batch["no such key"]', "in broken", "raised by FreeScaleStrategy(ids_of=broken)"]),
    ],
)
def test_what_it_does_wrong_is_an_error_on_every_rank(function: Callable[[Batch], Any], parts: list[str]) -> None:
    for told in run_distributed(_error, 2, training.Computes, as_tensors, ids_of=function):
        assert all(part in told for part in parts), told


def only_features(batch: Batch) -> KeyedJaggedTensor:
    return batch["features"]


def test_one_for_several_collections_is_an_error() -> None:
    for told in run_distributed(_error, 2, training.TwoCollections, with_tags, ids_of=only_features):
        assert "one KeyedJaggedTensor, but 2 collections are overlapped" in told and "['net.embeddings', 'tags']" in told


class HasAnAttribute(CountingModel):
    """Something of that name that is no method of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_ids = nn.Identity()


def test_an_attribute_of_that_name_is_no_method() -> None:
    for run in run_distributed(partial(_fit, HasAnAttribute, dict), 2):
        assert run.looked_ahead() == FROM_THE_BATCH


# -- what contradicts itself


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": "dry_run"}, r"lookahead='dry_run'\): pass 'batch' or 'trial_run'"),
        ({"lookahead": "trial_run", "overlap": False}, "overlap=False, lookahead='trial_run'"),
        ({"ids_of": computed_ids, "overlap": False}, "overlap=False, ids_of=..."),
        ({"ids_of": computed_ids, "lookahead": "trial_run"}, "lookahead='trial_run', ids_of=..."),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeScaleStrategy(**options)


def test_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ids_of='ids'.*pass a function"):
        FreeScaleStrategy(ids_of="ids")


def test_trial_runs_of_a_module_that_tells_its_ids_are_refused() -> None:
    for told in run_distributed(_error, 2, Tells, as_tensors, lookahead="trial_run"):
        assert "Tells.embedding_ids tells the ids" in told


# -- a loader that is asked for early


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


class Endless(IterableDataset):
    """Nobody knows how many batches, so Lightning fetches the first when it makes the loader."""

    def __iter__(self) -> Iterator[Batch]:
        yield from my_loader(STEPS)


def _early(make: Callable[[], CountingModel], stream: bool) -> tuple[Run, Run]:
    runs = []
    for strategy in strategies():
        torch.manual_seed(0)
        loader = DataLoader(Endless(), batch_size=None) if stream else my_loader(STEPS)
        runs.append(fit(make(), loader, max_epochs=EPOCHS, strategy=strategy))
    return runs[0], runs[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [AsksEarly, AsksInSetup])
def test_a_loader_that_is_made_before_the_tables(make: Callable[[], CountingModel], stream: bool) -> None:
    ranks = run_distributed(_early, 2, make, stream)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == FROM_THE_BATCH and not _notices(run)


def test_a_loader_that_is_made_before_the_module_has_a_collection() -> None:
    ranks = run_distributed(_early, 2, MakesItsTablesLate, False)
    assert_bitwise(ranks)
    (told,) = [text for _, run in ranks for text in _notices(run)]
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
