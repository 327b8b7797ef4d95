"""The overlap engine against plain TorchRec: the same numbers after every step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap import id_exchange
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, Run, batches, train_overlapped, train_plain

STEPS = 20


def _heads_apart() -> dict[str, Run]:
    """As on a GPU, whose host would have to wait for heads that come there."""
    id_exchange.heads_travel_apart = lambda device: True
    return _both("rowwise_adagrad")


def _both(optimizer: str) -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    how = OPTIMIZERS[optimizer]
    return {
        "plain": train_plain(how, data),
        "exact": train_overlapped(how, data, dedup=False),
        "dedup": train_overlapped(how, data, dedup=True),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), pytest.param("adagrad", marks=pytest.mark.slow), "rowwise_adagrad"],
)
def test_same_as_plain_torchrec(optimizer: str, ranks: int) -> None:
    _assert_same(run_distributed(_both, ranks, optimizer))


def test_heads_that_travel_apart_change_nothing() -> None:
    _assert_same(run_distributed(_heads_apart, 2))


def _assert_same(ranks: list[dict[str, Run]]) -> None:
    for runs in ranks:
        plain, exact, dedup = runs["plain"], runs["exact"], runs["dedup"]
        assert len(set(plain.losses)) > STEPS / 2, "the loss must move, or equality means nothing"
        assert exact.losses == plain.losses
        assert dedup.losses == pytest.approx(plain.losses, rel=1e-6)
        for name, value in {**plain.tables, **plain.dense}.items():
            assert torch.equal({**exact.tables, **exact.dense}[name], value), name
            # of the whole, not of every number: Adagrad makes a full step of a first gradient that cancels out to rounding
            other = {**dedup.tables, **dedup.dense}[name]
            assert (other - value).norm() <= 1e-6 * value.norm() + 1e-9, name
        for run in (exact, dedup):
            assert run.statistics["predicted_lookups"] == 2 * (STEPS - 1)
            assert run.statistics["unpredicted_lookups"] == 2
            assert run.statistics["mispredicted_lookups"] == 0
