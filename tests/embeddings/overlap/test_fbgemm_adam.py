"""Adam on tables on CUDA, which FBGEMM does not have on the CPU: its own Python runs, and a recorder is in place of its C++."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu.split_table_batched_embeddings_ops_training as fbgemm
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from torch import Tensor

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.local_rows import LocalTable, TableKernel
from lightning_freescale.embeddings.shards import prepare_kernel

ROWS, DIM = (6, 4), 4
FEATURES = [0, 0, 1]
"""The table of each."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FBGEMM's module of two tables; ``calls`` has the arguments of its operator."""
    sizes = [(rows, DIM, EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU) for rows in ROWS]
    # the same class and forward as on CUDA, but that it refuses to be made with Adam
    module: Any = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        sizes, feature_table_map=FEATURES, optimizer=EmbOptimType.EXACT_ADAGRAD, pooling_mode=PoolingMode.NONE
    )
    module.optimizer, module.calls = EmbOptimType.ADAM, []
    for kind in ("momentum2", "row_counter"):
        for part in ("dev", "host", "uvm", "offsets", "placements"):
            setattr(module, f"{kind}_{part}", torch.empty(0))

    def lookup(common: Any, arguments: Any, first: Any, second: Any, step: int, **others: Any) -> Tensor:
        result = torch.zeros(len(common.indices), DIM, requires_grad=True)
        result.register_hook(lambda gradient: call.update(gradient=gradient))
        call = {"step": step, "ids": common.indices.tolist(), "offsets": common.offsets.tolist()}
        call["lr"] = float(module.learning_rate_tensor)
        module.calls.append(call)
        return result

    monkeypatch.setattr(fbgemm.invokers.lookup_adam, "invoke", lookup)
    return module


def _kernel(module: Any) -> TableKernel:
    weights = module.split_embedding_weights()
    return TableKernel(module, FEATURES, {i: LocalTable(i, f"table {i}", 100 * i, weights[i]) for i in range(2)})


def test_a_step_counts_once_however_many_updates_it_has(module: Any) -> None:
    """The colliding rows are updated before the others; FBGEMM alone would count every call."""
    kernel = _kernel(module)
    for step in range(4):
        for rows in ([1, 2], [3, 4]):
            kernel.update({0: (torch.tensor(rows), torch.ones(2, DIM))}, [UpdateSettings(step, {"lr": 0.1 / (step + 1)})] * 2)
        prepare_kernel(module, {"table 0": UpdateSettings(step)})
        module(indices=torch.tensor([1]), offsets=torch.tensor([0, 1, 1, 1]))  # a lookup without an update
    assert [call["step"] for call in module.calls] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4], "torch counts from 1"
    assert [call["lr"] for call in module.calls[::3]] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])


def test_rows_and_gradients_go_to_their_tables(module: Any) -> None:
    """FBGEMM numbers features, each of which has its part of the ids; the engine has rows by table, from any number on."""
    kernel, gradients = _kernel(module), torch.arange(5.0 * DIM).view(5, DIM)
    given = {1: (torch.tensor([103, 101]), gradients[3:]), 0: (torch.tensor([5, 0, 5]), gradients[:3])}
    kernel.update(given, [UpdateSettings(0)] * 2)
    (call,) = module.calls
    assert call["ids"] == [5, 0, 5, 3, 1] and call["offsets"] == [0, 3, 3, 5]
    assert torch.equal(call["gradient"], gradients)
    kernel.update({1: given[1]}, [UpdateSettings(1)] * 2)
    assert module.calls[1]["ids"] == [3, 1] and module.calls[1]["offsets"] == [0, 0, 0, 2]
