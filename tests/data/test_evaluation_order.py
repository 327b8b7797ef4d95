"""Validation and test group samples of similar length if batches are padded, without losing or adding samples or batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data import BalanceOptions
from tests.data.test_parquet import ROW_GROUPS, _data, folder

__all__ = ["folder"]  # a fixture
PADDED = BalanceOptions(padding="batch")
Plan = list[list[NDArray[np.int64]]]
CASES = [(1000, 1), (1000, 3), (1001, 2), (20000, 2), *((samples, ranks) for samples in range(5, 60) for ranks in (1, 2, 4))]


class Sized(list[int]):
    lengths: Any = None


def _sized(samples: int, seed: int = 0) -> Sized:
    dataset = Sized(range(samples))
    dataset.lengths = np.random.RandomState(seed).lognormal(3, 1, samples).astype(int) + 1
    return dataset


def _plans(dataset: Any, ranks: int, balance: Any = PADDED, limit: int | float = 1.0, loader: str = "val") -> Plan:
    """Return the batches of each rank in loading order."""
    plans: Plan = []
    for rank in range(ranks):
        data = FreeScaleDataModule(dataset, np.ones(len(dataset)), 8, balance=balance, **{f"{loader}_dataset": dataset})
        trainer: Any = SimpleNamespace(global_rank=rank, world_size=ranks, limit_val_batches=limit, strategy=_CPU)
        data.trainer = trainer
        plans.append([batch.numpy() for batch in getattr(data, f"{loader}_dataloader")()])
    return plans


_CPU = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))


def _in_order(samples: int, ranks: int) -> Plan:
    options: dict[str, Any] = {"num_replicas": ranks, "shuffle": False, "balance": False}
    return [[np.array(each) for each in BalancedSampler(np.zeros(samples), 8, rank=rank, **options)] for rank in range(ranks)]


def _computed(plan: Plan, lengths: NDArray[Any]) -> list[list[int]]:
    return [[len(batch) * lengths[batch].max() for batch in of_rank] for of_rank in plan]


def _equal(one: Plan, other: Plan) -> bool:
    return all(np.array_equal(a, b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("samples", "ranks"), CASES)
def test_samples_of_similar_length_share_a_batch(samples: int, ranks: int) -> None:
    dataset, before = _sized(samples, samples), _in_order(samples, ranks)
    for loader in ("val", "test"):
        plan = _plans(dataset, ranks, loader=loader)
        assert sorted(np.concatenate([batch for of_rank in plan for batch in of_rank])) == list(range(samples))
        assert [[len(batch) for batch in each] for each in plan] == [[len(batch) for batch in each] for each in before]
        computed, drawn = _computed(plan, dataset.lengths), _computed(before, dataset.lengths)
        assert np.max(computed) <= np.max(drawn)
        if samples >= 1000:
            assert np.sum(computed) < min(0.5 * np.sum(drawn), 1.2 * dataset.lengths.sum())
            of_ranks = np.sum(computed, axis=1)
            assert of_ranks.max() < 1.02 * of_ranks.mean()


@pytest.mark.parametrize(("limit", "steps"), [(3, 3), (0.5, 31), (0, 0)])
def test_a_limit_keeps_its_samples(limit: int | float, steps: int) -> None:
    plan, before = _plans(_sized(1000), 2, limit=limit), _in_order(1000, 2)
    first, expected = ({i for each in plans for batch in each[:steps] for i in batch.tolist()} for plans in (plan, before))
    assert first == expected and _equal([each[steps:] for each in plan], [each[steps:] for each in before])
    assert steps == 0 or not _equal(plan, before)


@pytest.mark.parametrize("balance", [False, True, BalanceOptions(padding="none"), BalanceOptions(padding="fixed")])
def test_other_batches_are_loaded_in_order(balance: Any) -> None:
    assert _equal(_plans(_sized(100), 2, balance), _in_order(100, 2))
    assert _equal(_plans(_sized(100), 2, loader="predict"), _in_order(100, 2)), "nothing restores an order of predictions"


@pytest.mark.parametrize("lengths", [None, [1, 2], list.__len__, [[1], [1, 2]], [float("nan")] * 100])
def test_lengths_that_do_not_fit_are_not_used(lengths: Any) -> None:
    dataset = Sized(range(100))
    dataset.lengths = lengths
    assert _equal(_plans(dataset, 2), _in_order(100, 2))


def test_padding_that_is_found_later_groups_from_the_next_epoch_on() -> None:
    dataset = _sized(100)
    data = FreeScaleDataModule(dataset, dataset.lengths, 8, val_dataset=dataset)
    loader = data.val_dataloader()
    assert _equal([[batch.numpy() for batch in loader]], _in_order(100, 1))
    data.train.know_padding({"padding": "batch", "padded_steps": [(0, 5, {"assignment_mode": "free"})]})
    grouped = _plans(dataset, 1)
    assert _equal([[batch.numpy() for batch in loader]], grouped) and not _equal(grouped, _in_order(100, 1))


def test_parquet_is_read_nearly_in_order(folder: Path) -> None:
    data = _data(folder, max_length=9, balance=PADDED)
    batches = list(data.val_dataloader())
    padded = [int(batch["features"].lengths().max()) * len(batch["user"]) for batch in batches]
    lengths = data.val_dataset.lengths
    assert lengths.max() == 9 and sum(padded) < 1.3 * lengths.sum()
    assert len(set(np.concatenate([batch["user"] for batch in batches]).tolist())) == len(lengths)
    assert data.val_dataset.histories.reads < 1.25 * ROW_GROUPS
