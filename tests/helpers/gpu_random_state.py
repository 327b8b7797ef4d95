"""Random states of GPUs that are not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gpu_random_states(gpus: int) -> dict[int, Tensor]:
    """Let torch have them, in this process for good; return them by GPU, uint8 of shape ``[1]``."""
    states = {index: torch.zeros(1, dtype=torch.uint8) for index in range(gpus)}

    def index_of(device: Any) -> int:
        return device if isinstance(device, int) else torch.device(device).index

    torch.cuda.get_rng_state = lambda device="cuda": states[index_of(device)].clone()
    torch.cuda.set_rng_state = lambda state, device="cuda": states.update({index_of(device): state.clone()})
    return states
