"""Sharding for a GPU: its random numbers are left alone, and its memory is planned with. Stand-ins, as there is none here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError

from lightning_freescale.embeddings import planning
from lightning_freescale.embeddings.planning import row_wise_planner
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed
from tests.helpers.gpu_random_state import gpu_random_states
from tests.helpers.sequences import Sequences


def _sharded() -> tuple[dict[int, list[int]], bool]:
    states, shard_collection = gpu_random_states(2), TableSharding._shard_collection
    drawn: list[str] = []

    def draw(self: TableSharding, collection: Any, *args: Any) -> Any:
        states[0] = states[1] = torch.ones(1, dtype=torch.uint8)
        drawn.append(collection.path)
        self.device = torch.device("cpu")  # TorchRec makes its shards here
        return shard_collection(self, collection, *args)

    TableSharding._shard_collection = draw
    sharding = TableSharding(Sequences(), torch.device("cpu"))
    planner = row_wise_planner([collection for collection, *_ in sharding._replaced], torch.device("cpu"), 1, 1)
    sharding.device = torch.device("cuda", 1)
    sharding.shard(group=dist.group.WORLD, local_world_size=1, planner=planner)
    return {index: state.tolist() for index, state in states.items()}, drawn == ["items", "tags"]


def test_the_rank_draws_on_its_own_gpu_what_it_would_without_sharding() -> None:
    assert run_distributed(_sharded, 1) == [({0: [1], 1: [0]}, True)]


def _planned(total_bytes: int) -> None:
    planning.torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=total_bytes)
    tensor = torch.tensor
    planning.torch.tensor = lambda value, device: tensor(value)
    TableSharding._shard_collection = lambda *args: (_ for _ in ()).throw(InterruptedError("planned"))
    gpu_random_states(2)
    sharding = TableSharding(Sequences(), torch.device("cpu"))
    sharding.device = torch.device("cuda", 1)
    expected = InterruptedError if total_bytes > 10**6 else PlannerError
    with pytest.raises(expected):
        sharding.shard(group=dist.group.WORLD, local_world_size=1)


@pytest.mark.parametrize("total_bytes", [10**9, 20_000])
def test_tables_are_planned_with_the_memory_of_the_gpu(total_bytes: int) -> None:
    """The second has room for the dense part, and none for the tables."""
    run_distributed(_planned, 1, total_bytes)
