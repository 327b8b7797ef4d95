"""How rows are updated on CUDA: by FBGEMM's Python as it is there, with a recorder in place of its C++."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.local_rows import LocalTable, TableKernel
from lightning_freescale.embeddings.shards import prepare_kernel
from tests.helpers.fake_adam import DIM, FakeAdam

FEATURES = [0, 0, 1]
"""The table of each."""


@pytest.fixture
def adam(monkeypatch: pytest.MonkeyPatch) -> FakeAdam:
    return FakeAdam(monkeypatch, (6, 4), FEATURES)


@pytest.fixture
def kernel(adam: FakeAdam) -> TableKernel:
    """The rows of the second table are numbered from 100 on."""
    weights = adam.module.split_embedding_weights()
    return TableKernel(adam.module, FEATURES, {i: LocalTable(i, f"table {i}", 100 * i, weights[i]) for i in range(2)})


def test_a_step_counts_once_however_many_updates_it_has(adam: FakeAdam, kernel: TableKernel) -> None:
    """Colliding rows are updated before the others, and validation looks up between; FBGEMM alone would count every call."""
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
