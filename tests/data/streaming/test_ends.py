"""Streams that stop early or fail: no thread is left, and no rank waits for another."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_freescale.balance.assign import assign
from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.streams import Part, SlowOnOne, loader_of, sample_cost, stream_threads


@pytest.mark.parametrize("balancing", ["local", "global"])
def test_stopping_early_leaves_no_thread(balancing: str) -> None:
    def run() -> tuple[list[list[Any]], int, int]:
        loader, threads = loader_of([400, 400], kind=SlowOnOne, stream_balancing=balancing), []
        batches = []
        for step, batch in enumerate(loader):
            threads.append(stream_threads())
            batches.append(batch)
            if step == 6:
                time.sleep(0.1 * (dist.get_rank() == 0))  # its thread goes on, and needs that of rank 1 to finish
                break
        loader.set_epoch(1)  # the ranks' threads have done the same, so another epoch on the same group is in step
        return batches + list(islice(loader, 3)), max(threads), stream_threads()

    ranks = run_distributed(run, 2)
    assert [len(rank[0]) for rank in ranks] == [10, 10]
    assert {(most, last) for _, most, last in ranks} == {(2, 1)}


def test_works_ahead_but_not_further() -> None:
    """The data set is read for the batches that may be made, and for no others."""
    read: list[int] = []
    threads = stream_threads()

    class Watched(Part):
        def _sample(self, number: int) -> tuple[int, int, float]:
            read.append(number)
            return super()._sample(number)

    loader = BalancedStreamLoader(
        Watched(0, 400), 4, cost_fn=sample_cost, stream_balancing="global", collate_fn=list, prefetch_batches=3
    )
    batches = iter(loader)
    for taken in range(1, 6):
        next(batches)
        done = 4 * (taken + 3 + 1)  # one global batch is read ahead of the last that may be made
        for _ in range(1000):
            if len(read) >= done:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.02)
        assert len(read) == done
    batches.close()
    assert stream_threads() == threads


@pytest.mark.parametrize("balancing", ["local", "global"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_one_rank_ends_all(balancing: str, workers: int) -> None:
    def run() -> tuple[str, int, int]:
        loader, taken = loader_of([400, 400, 400], breaks_at=100, stream_balancing=balancing, num_workers=workers), 0
        try:
            for _ in loader:
                taken += 1
        except (KeyError, RuntimeError) as error:
            left = stream_threads() + (len(multiprocessing.active_children()) if dist.get_rank() != 1 else 0)
            return f"{type(error).__name__}: {error}", taken, left
        return "no error", taken, stream_threads()

    first, broken, last = run_distributed(run, 3)
    assert "the needle" in broken[0] and broken[0].startswith("KeyError")
    assert first[0] == last[0] == "PeerFailed: rank 1 failed to read its stream: its own traceback tells why"
    assert first[1] == broken[1] == last[1] > 10
    assert first[2] == broken[2] == last[2] == 1


@pytest.mark.usefixtures("patient")
def test_a_killed_rank_ends_all() -> None:
    def run() -> None:
        for step, _ in enumerate(loader_of([400, 400])):
            if step == 3 and dist.get_rank() == 1:
                import os

                os._exit(3)

    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*PeerFailed.*rank 1: died"):
        run_distributed(run, 2, timeout=60)


def test_samples_that_cannot_be_sent() -> None:
    class Unpicklable(Part):
        def _sample(self, number: int) -> Any:
            _, number, cost = super()._sample(number)
            return (lambda: number) if self.rank == 1 and number == 41 else self.rank, number, cost

    def run() -> str:
        loader = loader_of([80, 80], kind=Unpicklable, stream_balancing="global", assign_fn=_swap)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is the answer)
            list(loader)
        both = torch.ones(1)
        dist.all_reduce(both, group=loader.group)
        assert both == 2, "the ranks are still in step"
        return f"{caught.type.__name__}: {caught.value}"

    other, broken = run_distributed(run, 2)
    assert "rank 1 could not pickle its samples" in other
    assert "lambda" in broken


def _swap(costs: np.ndarray, ranks: int) -> Any:
    given = assign(costs, ranks)
    return dataclasses.replace(given, rank_of_sample=np.arange(len(costs))[::-1] * ranks // len(costs))
