"""Updates by FBGEMM's own backward, as on a GPU: on its CPU kernels, and with a recorder in place of its Adam."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    invokers,
)
from torch import Tensor

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap import OverlapEngine, local_rows
from lightning_freescale.embeddings.overlap.local_rows import LocalTable, TableKernel
from lightning_freescale.embeddings.shards import prepare_kernel
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import BagModel, bag_loader
from tests.helpers.overlap_training import assert_same, fit
from tests.helpers.sequences import OPTIMIZERS, batches, known, sharded

DIM, STEPS = 4, 6
FEATURES = [0, 0, 1]
"""The table of each feature."""


class FakeAdam:
    """FBGEMM's Adam, which exists on GPUs only: its Python up to the call of the kernel, whose last arguments are recorded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.module: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in (6, 4)],
            feature_table_map=FEATURES,
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            pooling_mode=PoolingMode.NONE,
        )
        self.module.optimizer = EmbOptimType.ADAM
        self.steps: list[int] = []
        for name in ("dev", "host", "uvm", "offsets", "placements"):
            for state in ("momentum2", "row_counter"):
                setattr(self.module, f"{state}_{name}", getattr(self.module, f"momentum1_{name}"))
        patch.setattr(invokers.lookup_adam, "invoke", self._invoke)

    def _invoke(self, common: Any, arguments: Any, first: Any, second: Any, step: int, **_: Any) -> Tensor:
        names = ("eps", "beta1", "beta2", "weight_decay")
        self.options = {"lr": common.learning_rate_tensor.item(), **{name: getattr(arguments, name) for name in names}}
        self.steps.append(step)
        self.ids, self.offsets = common.indices.tolist(), common.offsets.tolist()
        result = torch.zeros(len(self.ids), DIM, requires_grad=True)
        result.register_hook(lambda gradient: setattr(self, "gradients", gradient))
        return result

    def look_up(self) -> None:
        """Do the common part of a lookup in training and in validation."""
        self.module(indices=torch.tensor([1]), offsets=torch.tensor([0, 1, 1, 1]))


@pytest.fixture
def adam(monkeypatch: pytest.MonkeyPatch) -> FakeAdam:
    return FakeAdam(monkeypatch)


@pytest.fixture
def kernel(adam: FakeAdam) -> TableKernel:
    """Number the rows of the second table from 100 on."""
    weights = adam.module.split_embedding_weights()
    return TableKernel(adam.module, FEATURES, {i: LocalTable(i, f"table {i}", 100 * i, weights[i]) for i in range(2)})


def test_adam_is_given_its_options_and_count_before_every_update(adam: FakeAdam) -> None:
    """Check that omitted options are unchanged."""
    for step in (0, 1, 2, 7):
        options = {"lr": 0.5**step, "eps": 0.1 * step, "beta1": 0.5, "beta2": 0.25 * step, "weight_decay": 0.125 * step}
        for given in (options, {}):
            for _ in range(2):
                adam.look_up()  # a lookup of validation, which FBGEMM counts as well
            prepare_kernel(adam.module, {"table": UpdateSettings(step, given)})
            adam.look_up()
            assert adam.steps[-1] == step + 1 and adam.options == options


def test_tables_of_one_kernel_have_one_count_and_are_frozen_together(adam: FakeAdam) -> None:
    module = adam.module
    with pytest.raises(ValueError, match=r"\['a', 'b'\].*\[3, 1\]"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(1)})
    with pytest.raises(ValueError, match=r"\['b'\] are frozen .*\['a'\]"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(3, frozen=True)})
    prepare_kernel(module, {"a": UpdateSettings(3, frozen=True), "b": UpdateSettings(3, frozen=True)})
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_step_counts_once_however_many_updates_it_has(adam: FakeAdam, kernel: TableKernel) -> None:
    """Update colliding rows before the others, with a lookup of validation between; FBGEMM alone would count every call."""
    rates = []
    for step in range(4):
        for rows in ([1, 2], [3, 4]):
            settings = UpdateSettings(step, {"lr": 0.5 / (step + 1)})
            kernel.update({0: (torch.tensor(rows), torch.ones(2, DIM))}, [settings] * 2)
        rates.append(adam.options["lr"])
        prepare_kernel(adam.module, {"table 0": UpdateSettings(step)})
        adam.look_up()
    assert adam.steps == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4], "torch counts from 1"
    assert rates == pytest.approx([0.5, 0.25, 0.5 / 3, 0.125])


def test_rows_and_gradients_go_to_their_tables(adam: FakeAdam, kernel: TableKernel) -> None:
    gradients = torch.arange(5.0 * DIM).view(5, DIM)
    given = {1: (torch.tensor([103, 101]), gradients[3:]), 0: (torch.tensor([5, 0, 5]), gradients[:3])}
    kernel.update(given, [UpdateSettings(0)] * 2)
    assert adam.ids == [5, 0, 5, 3, 1] and adam.offsets == [0, 3, 3, 5]
    assert torch.equal(adam.gradients, gradients)
    kernel.update({1: given[1]}, [UpdateSettings(1)] * 2)
    assert adam.ids == [3, 1] and adam.offsets == [0, 0, 0, 2]
    assert torch.equal(adam.gradients, gradients[3:])


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
    """Check the thread of an update: by default autograd would run it on the waiting thread on CUDA."""
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


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", pytest.param("adagrad", marks=pytest.mark.slow)])
def test_kernels_of_bags_update_row_by_row(optimizer: str) -> None:
    """Check that bags still pool in validation."""
    for ours, its in run_distributed(_bags_by_both_kernels, 2, optimizer):
        assert its.losses == ours.losses and len(set(its.losses)) > STEPS / 2
        assert_same(its.weights, ours.weights)
        assert_same(its.states, ours.states)
