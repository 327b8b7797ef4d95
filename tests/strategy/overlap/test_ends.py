"""How a fit ends: rightly with nothing left behind, wrongly with an error on every rank and no hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.overlap_modules import TwoCollections, with_tags
from tests.helpers.overlap_training import CountingModel, Run, changed_loader, exchange_threads, fit, my_loader

SOON = 100.0


def _uneven(extra: int, epochs: int, validates: bool) -> Run:
    steps = 4 + (extra if os.environ["RANK"] == "1" else 0)
    return fit(
        CountingModel(), my_loader(steps), my_loader(2) if validates else None, max_epochs=epochs, num_sanity_val_steps=0
    )


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(("extra", "epochs"), [(1, 1), (2, 2), (-1, 1)])
def test_loaders_of_unequal_length(extra: int, epochs: int, validates: bool) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_distributed(_uneven, 2, extra, epochs, validates, timeout=SOON)
    assert time.monotonic() - started < SOON / 2
    shorter = 0 if extra > 0 else 1
    assert f"ranks [{shorter}] have no batch after step" in str(failure.value)
    assert "give every rank the same number of batches" in str(failure.value)


class Normalizes(CountingModel):
    """DDP copies its buffers to all ranks before every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "label": self.norm(batch["label"][:, None])[:, 0]}, batch_idx)


def _uneven_with_buffers() -> None:
    fit(Normalizes(), my_loader(4 + int(os.environ["RANK"])))


@pytest.mark.slow
def test_loaders_of_unequal_length_and_buffers() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0\] have no batch after step"):
        run_distributed(_uneven_with_buffers, 2, timeout=8.0)


class Fails(CountingModel):
    """One rank raises or dies in its third step, before or after its lookup."""

    def __init__(self, how: str, after_lookup: bool) -> None:
        super().__init__()
        self.how, self.after_lookup = how, after_lookup

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.after_lookup:
            loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            if self.how == "raises":
                raise KeyError("the needle")
            os.kill(os.getpid(), signal.SIGKILL)
        return loss if self.after_lookup else super().training_step(batch, batch_idx)


def _fails(how: str, after_lookup: bool) -> None:
    fit(Fails(how, after_lookup), my_loader(8))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("after_lookup", [False, True])
@pytest.mark.parametrize(
    ("how", "message"), [("raises", "rank 1: (?s:.*)the needle"), ("dies", "rank 1: died with exit code -9")]
)
def test_the_other_ranks_end_too(how: str, message: str, after_lookup: bool) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=message) as failure:
        run_distributed(_fails, 3, how, after_lookup, timeout=SOON)
    assert time.monotonic() - started < SOON / 2
    for rank in (0, 2):
        assert f"rank {rank}: Traceback" in str(failure.value), "with an error of its own"
    assert "did not finish" not in str(failure.value)


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _leaves_behind() -> list[tuple[list[str], int]]:
    """After one fit and after more of the same module."""
    module, left = TwoCollections(), []
    for epochs in (1, 2, 1):
        fit(module, changed_loader(4, with_tags), my_loader(2), max_epochs=epochs)
        left.append((exchange_threads(), _groups()))
    return left


def test_nothing_is_left_of_a_fit() -> None:
    for left in run_distributed(_leaves_behind, 2):
        assert [threads for threads, _ in left] == [[], [], []]
        assert len({groups for _, groups in left}) == 1


class RaisesAlone(CountingModel):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise KeyError("the needle")
        return super().training_step(batch, batch_idx)


def _raises_then_trains() -> tuple[list[str], int, list[float], list[float]]:
    before, losses = _groups(), []
    with pytest.raises(KeyError, match="the needle"):
        fit(RaisesAlone(), my_loader(8))
    threads, groups = exchange_threads(), _groups() - before
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(fit(CountingModel(), my_loader(4)).losses)
    return threads, groups, *losses


@pytest.mark.slow
def test_nothing_is_left_of_a_fit_that_raised() -> None:
    threads, groups, first, second = run_distributed(_raises_then_trains, 1)[0]
    assert threads == []
    assert groups <= 1, "the group of the embedding exchange stays with the module"
    assert first == second and len(first) == 4
