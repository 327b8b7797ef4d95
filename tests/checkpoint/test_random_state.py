"""Random states of all ranks and of simulated GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.checkpoint.run_state import gather_random_states, set_random_state
from lightning_freescale.testing import run_distributed
from tests.helpers.gpu_random_state import gpu_random_states


def _goes_on() -> tuple[bool, dict[int, list[int]], list[int]]:
    rank = dist.get_rank()
    states, own = gpu_random_states(2), torch.device("cuda", rank)
    states[rank] = torch.tensor([10 + rank], dtype=torch.uint8)
    kept = gather_random_states(own)
    drawn = torch.rand(3)
    states[0], states[1] = (torch.zeros(1, dtype=torch.uint8) for _ in range(2))
    set_random_state(kept, own)
    seen = [int(each["cuda"]) for each in kept]
    return torch.equal(torch.rand(3), drawn), {index: state.tolist() for index, state in states.items()}, seen


def test_each_rank_goes_on_with_the_state_of_its_own_gpu() -> None:
    for rank, (same, states, seen) in enumerate(run_distributed(_goes_on, 2)):
        assert same and seen == [10, 11]
        assert states == {rank: [10 + rank], 1 - rank: [0]}


def _on_one_rank() -> tuple[list[Tensor | None], dict[int, list[int]]]:
    kept, states = gather_random_states(torch.device("cpu")), gpu_random_states(2)
    set_random_state(kept, torch.device("cuda", 0))
    return [each["cuda"] for each in kept], {index: state.tolist() for index, state in states.items()}


def test_a_checkpoint_of_the_cpu_goes_on_on_a_gpu() -> None:
    assert run_distributed(_on_one_rank, 1) == [([None], {0: [0], 1: [0]})]
