"""The exchange in two levels: the numbers of the flat one, and less between nodes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, Run, batches, ids_by_turns, train_overlapped, train_plain

STEPS = 20
TWO_LEVEL = {"exchange": "two_level", "ranks_per_node": 2}
HOW = OPTIMIZERS["rowwise_adagrad"]


def assert_close(mine: Run, other: Run) -> None:
    """Up to the order of summation."""
    assert mine.losses == pytest.approx(other.losses, rel=1e-6)
    for name, value in {**other.tables, **other.dense}.items():
        found = {**mine.tables, **mine.dense}[name]
        # of the whole, not of every number: Adagrad makes a full step of a first gradient that cancels out to rounding
        assert (found - value).norm() <= 1e-6 * value.norm() + 1e-9, name


def _all(optimizer: str) -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    how = OPTIMIZERS[optimizer]
    return {
        "plain": train_plain(how, data),
        "flat": train_overlapped(how, data, dedup=True, ranks_per_node=2),
        "two_level": train_overlapped(how, data, dedup=True, **TWO_LEVEL),
    }


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_same_numbers(optimizer: str) -> None:
    for runs in run_distributed(_all, 4, optimizer):
        assert len(set(runs["plain"].losses)) > STEPS / 2, "the loss must move, or equality means nothing"
        assert_close(runs["two_level"], runs["flat"])
        assert_close(runs["two_level"], runs["plain"])
        for name in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "tokens", "rows", "dedup_bytes"):
            assert runs["two_level"].statistics[name] == runs["flat"].statistics[name], name
        assert 0 < runs["two_level"].statistics["cross_node_bytes"] < runs["flat"].statistics["cross_node_bytes"]


def _unexpected() -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    return {
        "plain": train_plain(HOW, data),
        "two_level": train_overlapped(HOW, data, dedup=True, submit=ids_by_turns, **TWO_LEVEL),
    }


def test_ids_that_are_late_wrong_or_unknown() -> None:
    results = run_distributed(_unexpected, 4)
    for runs in results:
        assert_close(runs["two_level"], runs["plain"])
    for name in ("mispredicted_lookups", "unpredicted_lookups", "predicted_lookups"):
        assert sum(runs["two_level"].statistics[name] for runs in results) > 16, name
