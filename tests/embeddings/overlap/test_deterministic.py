"""On CUDA a run gives the same numbers twice: the engine uses nothing that torch documents as nondeterministic there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.testing import run_distributed
from tests.helpers.gpu_training import train
from tests.helpers.jagged import copy_of
from tests.helpers.nondeterministic import WatchDeterminism, undocumented
from tests.helpers.pretended_gpu import GPU
from tests.helpers.sequences import OPTIMIZERS, Batch, NextIds, batches, known

STEPS = 10


def _told(step: int, following: Batch | None) -> NextIds | None:
    if following is None or step == 3:
        return None if following is None else {}
    told = batches(dist.get_rank(), 1)[0] if step == 6 else following
    return {path: copy_of(each).to(GPU) for path, each in known(told).items()}


def _watched(**options: Any) -> tuple[set[str], set[str]]:
    found: set[str] = set()
    seen: list[str] = []
    watches = [partial(WatchDeterminism, found, seen)]
    train(OPTIMIZERS["adagrad"], batches(dist.get_rank(), STEPS), on_gpu=True, told=_told, watches=watches, **options)
    return found, set(seen)


@pytest.mark.parametrize(
    "options",
    [{"dedup": True}, {"dedup": False, "holds": True}, pytest.param({"dedup": True, "holds": True}, marks=pytest.mark.slow)],
)
def test_nothing_depends_on_the_order_in_which_a_gpu_adds(options: dict[str, Any]) -> None:
    for found, seen in run_distributed(_watched, 2, **options):
        assert not found
        assert "index_put_" in seen, "it has looked at something"


def _adds_in_any_order() -> tuple[set[str], set[str]]:
    def sum_per_row(self: RowRequest, gradient: Tensor) -> Tensor:
        rows = torch.empty_like(self.order)
        rows[self.order] = torch.searchsorted(self.first, torch.arange(len(self.order), device=GPU), right=True).int() - 1
        return gradient.new_zeros(len(self.rows), gradient.shape[1]).index_add_(0, rows, gradient)

    RowRequest.sum_per_row = sum_per_row
    return _watched(dedup=True)


def test_the_check_finds_what_adds_in_any_order() -> None:
    for found, _ in run_distributed(_adds_in_any_order, 2):
        assert [text.split(" at ")[0] for text in found] == ["index_add_"]


def _overwrites() -> set[str]:
    found: set[str] = set()
    with WatchDeterminism(found, []):
        target, twice = torch.zeros(3), torch.tensor([1, 1])
        target[twice] = torch.tensor([2.0, 2.0])
        target[twice] = 5.0
        torch.zeros(3).scatter_(0, twice, torch.tensor([2.0, 2.0]))
        assert not found, "whichever value stays, it is the same"
        target[twice] = torch.tensor([2.0, 3.0])
        torch.zeros(3).scatter_(0, twice, torch.tensor([2.0, 3.0]))
        torch.zeros(3).index_copy_(0, twice, torch.tensor([2.0, 3.0]))
        torch.arange(3).cumsum(0), torch.bincount(twice)
        torch.ones(3).cumsum(0), torch.bincount(twice, torch.ones(2))
        torch.ones(3).median(), torch.ones(3).median(0)
    return {text.split(" at ")[0] for text in found}


def test_the_check_knows_the_forms() -> None:
    assert _overwrites() == {"index_put_", "scatter_", "index_copy_", "cumsum", "bincount", "median"}


def test_the_check_is_what_torch_documents() -> None:
    assert undocumented() == []
