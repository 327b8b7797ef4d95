"""What a function of the user tells of the next batch's ids: asked once a batch, exact even if it is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers.jagged import copy_of
from tests.helpers.overlap_modules import with_tags
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    STEPS,
    TOLD,
    Batch,
    CountingModel,
    Run,
    against_plain,
    as_tensors,
    assert_bitwise,
    changed_loader,
    error_of,
    fit_overlapped,
    notices,
)
from tests.helpers.recommender import DIM, FEATURES, ITEMS

ASKED: list[list[int]] = []


def computed_ids(batch: Batch) -> KeyedJaggedTensor:
    """What Computes looks up."""
    ASKED.append(batch["ids"].tolist())
    return KeyedJaggedTensor(FEATURES, modules.Computes.ids(None, batch), lengths=batch["lengths"])


def by_path(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": computed_ids(batch)}


class Tells(modules.Computes):
    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        return computed_ids(batch)


class TellsOthers(modules.Computes):
    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        raise AssertionError("ids_of goes before it")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (modules.Computes, {"ids_of": computed_ids}),
        (modules.Computes, {"ids_of": by_path}),
        (Tells, {}),
        (TellsOthers, {"ids_of": computed_ids}),
    ],
)
def test_a_function_tells_the_ids(make: Callable[[], CountingModel], options: dict[str, Any]) -> None:
    ranks = run_distributed(against_plain, 2, make, as_tensors, **options)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == TOLD and not notices(run)


def _asked(**options: Any) -> tuple[list[Any], list[Any], Run]:
    ASKED.clear()
    run = fit_overlapped(modules.Computes, as_tensors, ids_of=computed_ids, **options)
    return ASKED[:], [batch["ids"].tolist() for batch in changed_loader(STEPS, as_tensors)], run


def test_it_is_asked_once_for_every_batch_but_the_first_of_an_epoch() -> None:
    for asked, batches, _ in run_distributed(_asked, 2):
        assert asked == batches[1:] * EPOCHS


class ChangesOnTheWay(modules.OfTensors):
    """A hook copies the batch on its way, and leaves its mark on the copy."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "marked": True}

    def embedding_ids(self, batch: Batch) -> KeyedJaggedTensor:
        assert "marked" not in batch, "it is asked before hooks change the batch"
        return KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])


def test_it_is_given_the_batch_as_it_comes_out_of_the_loader() -> None:
    for run in run_distributed(partial(fit_overlapped, ChangesOnTheWay, as_tensors), 2):
        assert run.looked_ahead() == TOLD


def wrong_ids(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, (batch["ids"] + 1) % 13, lengths=batch["lengths"])


def test_wrong_ids_are_served_anew_and_told_once() -> None:
    ranks = run_distributed(against_plain, 2, modules.Computes, as_tensors, ids_of=wrong_ids)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == (0, 8, 4)
    (told,) = [text for _, run in ranks for text in notices(run)]
    assert "FreeScaleStrategy(ids_of=wrong_ids) tells others than the model looks up" in told


def wrong_on_one_rank(batch: Batch) -> KeyedJaggedTensor:
    return wrong_ids(batch) if os.environ["RANK"] == "1" else computed_ids(batch)


def test_wrong_ids_of_one_rank_end_it_on_all() -> None:
    ranks = run_distributed(against_plain, 3, modules.Computes, as_tensors, ids_of=wrong_on_one_rank)
    assert_bitwise(ranks)
    assert [run.looked_ahead() for _, run in ranks] == [(5, 7, 0), (0, 8, 4), (5, 7, 0)], "the others hear of it a step later"
    (told,) = [text for _, run in ranks for text in notices(run)]
    assert "on another rank FreeScaleStrategy(ids_of=wrong_on_one_rank) does not tell what the model looks up" in told


def beyond_the_table(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, batch["ids"] + ITEMS, lengths=batch["lengths"])


def test_ids_beyond_a_table_that_nobody_looks_up_are_wrong_ids() -> None:
    ranks = run_distributed(against_plain, 2, modules.Computes, as_tensors, ids_of=beyond_the_table)
    assert_bitwise(ranks)


class KnownInTheBatch(modules.TwoCollections):
    """Makes the ids of one collection in the step; those of the other stand in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "features": copy_of(batch["features"])}, batch_idx)


def only_items(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": batch["features"]}


def test_what_it_leaves_out_is_looked_for_in_the_batch() -> None:
    ranks = run_distributed(against_plain, 2, KnownInTheBatch, with_tags, ids_of=only_items)
    assert_bitwise(ranks)
    for _, run in ranks:
        assert run.looked_ahead() == tuple(a + b for a, b in zip(TOLD, KNOWN)) and not notices(run)


class WithBags(modules.Computes):
    """Beside it a collection that TorchRec exchanges: weighted bags pooled by their mean."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="bag", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history"])
        config.pooling = PoolingType.MEAN
        self.bags = EmbeddingBagCollection(tables=[config], is_weighted=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(FEATURES, batch["ids"], torch.ones(len(batch["ids"])), batch["lengths"])
        return super().training_step(batch, batch_idx) + self.bags(features)["history"].mean()


def of_bags_too(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {"net.embeddings": computed_ids(batch), "bags": computed_ids(batch)}


@pytest.mark.parametrize("function", [computed_ids, of_bags_too])
def test_beside_a_collection_that_is_not_overlapped(function: Callable[[Batch], Any]) -> None:
    ranks = run_distributed(against_plain, 2, WithBags, as_tensors, ids_of=function)
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


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (wrong_type, ["TypeError", "ids_of=wrong_type) returned a Tensor for 'net.embeddings': return a KeyedJaggedTensor"]),
        (wrong_type_inside, ["TypeError", "returned a Tensor for 'net.embeddings'"]),
        (unknown_path, ["ValueError", "'net.embedding', which is no embedding collection", "['net.embeddings']"]),
        (broken, ["KeyError", 'batch["no such key"]', "in broken", "raised by FreeScaleStrategy(ids_of=broken)"]),
    ],
)
def test_what_it_does_wrong_is_an_error_on_every_rank(function: Callable[[Batch], Any], parts: list[str]) -> None:
    for told in run_distributed(error_of, 2, modules.Computes, as_tensors, ids_of=function):
        assert all(part in told for part in parts), told


def only_features(batch: Batch) -> KeyedJaggedTensor:
    return batch["features"]


def test_one_for_several_collections_is_an_error() -> None:
    for told in run_distributed(error_of, 2, modules.TwoCollections, with_tags, ids_of=only_features):
        assert "ids without a path, but 2 collections are overlapped" in told and "['net.embeddings', 'tags']" in told


class HasAnAttribute(CountingModel):
    """Something of that name that is no method of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_ids = nn.Identity()


def test_an_attribute_of_that_name_is_no_method() -> None:
    for run in run_distributed(partial(fit_overlapped, HasAnAttribute, dict), 2):
        assert run.looked_ahead() == KNOWN


def test_trial_runs_of_a_module_that_tells_its_ids_are_refused() -> None:
    for told in run_distributed(error_of, 2, Tells, as_tensors, lookahead="trial_run"):
        assert "Tells.embedding_ids tells the ids" in told
