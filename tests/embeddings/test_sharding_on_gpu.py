"""Sharding leaves the random numbers of a GPU alone: with a stand-in for its state, as there is none here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

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
