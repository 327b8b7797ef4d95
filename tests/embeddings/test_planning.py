"""The planner believes in the memory that is there; with TorchRec told that the device is a GPU, as there is none here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner.types import PlannerError

from lightning_freescale.embeddings import planning
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.planning import memory_for_tables, row_wise_planner
from lightning_freescale.testing import run_distributed

GIB, RANKS, DIM = 2**30, 8, 128


class Tables(nn.Module):
    def __init__(self, gib_per_rank: int) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item", num_embeddings=gib_per_rank * GIB * RANKS // DIM // 4, embedding_dim=DIM, feature_names=["item"]
        )
        self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.dense = nn.Linear(1000, 1000, bias=False)
        self.register_buffer("seen", torch.zeros(10))


def _plan(gib_per_rank: int, memory: int | None) -> None:
    module = Tables(gib_per_rank)
    found = [collection for collection, _ in find_collections(module)]
    planner = row_wise_planner(found, torch.device("cuda"), RANKS, RANKS, memory)
    planner.plan(module, [collection.sharder for collection in found])


def test_what_fits_the_gpu_is_planned_and_nothing_else() -> None:
    _plan(100, 141 * GIB)
    with pytest.raises(PlannerError):
        _plan(100, 80 * GIB)
    with pytest.raises(PlannerError):  # what TorchRec takes for granted
        _plan(100, None)


def _memory(on_gpu: bool) -> int | None:
    total = (80 if dist.get_rank() else 141) * GIB
    planning.torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=total)
    module, tensor = Tables(1), torch.tensor
    planning.torch.tensor = lambda value, device: tensor(value)  # no such device here
    device = torch.device("cuda" if on_gpu else "cpu")
    return memory_for_tables(module, module.items.parameters(), device, dist.group.WORLD)


def test_the_smallest_gpu_counts_and_the_dense_part_has_its_place() -> None:
    assert run_distributed(_memory, 2, True) == [80 * GIB - 5 * 4 * 1000**2 - 40] * 2
    assert run_distributed(_memory, 2, False) == [None, None]


def _too_large() -> str:
    planning.torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=10**7)
    tensor = torch.tensor
    planning.torch.tensor = lambda value, device: tensor(value)
    with pytest.raises(ValueError, match="leaves no memory for embedding tables") as error:
        memory_for_tables(Tables(1), (), torch.device("cuda"), dist.group.WORLD)
    return str(error.value)


def test_a_dense_part_that_fills_the_gpu_is_refused() -> None:
    assert "pass FreeScaleStrategy(plan=...)" in run_distributed(_too_large, 1)[0]
