"""The update by FBGEMM's own backward, as on a GPU, on its kernels for the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap import OverlapEngine, local_rows
from lightning_freescale.embeddings.overlap.local_rows import TableKernel
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import BagModel, bag_loader
from tests.helpers.overlap_training import assert_same, fit
from tests.helpers.sequences import OPTIMIZERS, Run, batches, known, sharded, train_overlapped

STEPS = 8


def _both_kernels(optimizer: str) -> tuple[Run, Run]:
    data = batches(dist.get_rank(), STEPS)
    ours = train_overlapped(OPTIMIZERS[optimizer], data)
    local_rows.CpuKernel = TableKernel
    return ours, train_overlapped(OPTIMIZERS[optimizer], data)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_it_updates_to_the_same_bits(optimizer: str) -> None:
    for ours, its in run_distributed(_both_kernels, 2, optimizer):
        assert its.losses == ours.losses and len(set(its.losses)) > STEPS / 2
        for name, value in ours.tables.items():
            assert torch.equal(its.tables[name], value), name


def _saved_in_backward() -> tuple[set[tuple[str, bool]], list[int]]:
    local_rows.CpuKernel = TableKernel
    threads: set[tuple[str, bool]] = set()
    backward, saved = torch.Tensor.backward, []

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        name = "engine" if threading.current_thread().name.startswith("freescale-") else "training"
        threads.add((name, torch._C._is_multithreading_enabled()))
        backward(tensor, *args, **kwargs)

    torch.Tensor.backward = watched
    data = batches(dist.get_rank(), STEPS)
    with sharded(OPTIMIZERS["rowwise_adagrad"]) as (model, ddp, tables, _):
        engine = OverlapEngine(tables)
        for batch, following in zip(data, [*data[1:], None]):
            engine.begin_step(known(following))
            loss = ddp(batch)
            loss.register_hook(lambda _: saved.append(len(model.state_dict())))
            loss.backward()
            engine.end_backward()
        engine.drain()
        engine.close()
    return threads, saved


def test_a_backward_may_wait_for_it() -> None:
    """On CUDA autograd would run it on the thread that waits, unless told not to."""
    for threads, saved in run_distributed(_saved_in_backward, 2):
        assert threads == {("training", True), ("engine", False)}
        assert len(saved) == STEPS


def _bags_by_both_kernels(optimizer: str) -> tuple[Any, Any]:
    runs = []
    for kernel in (local_rows.CpuKernel, TableKernel):
        local_rows.CpuKernel = kernel
        torch.manual_seed(0)
        runs.append(fit(BagModel(optimizer), bag_loader(STEPS), bag_loader(2), strategy="freescale"))
    return runs[0], runs[1]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_kernels_of_bags_update_row_by_row(optimizer: str) -> None:
    """They pool, in validation, as they were made to."""
    for ours, its in run_distributed(_bags_by_both_kernels, 2, optimizer):
        assert its.losses == ours.losses and len(set(its.losses)) > STEPS / 2
        assert_same(its.weights, ours.weights)
        assert_same(its.states, ours.states)
