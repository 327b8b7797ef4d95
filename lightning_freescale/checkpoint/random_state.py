"""The random states of all ranks in a checkpoint: without them dropout after a resume would not be dropout without it."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_freescale._object_gather import gather_objects


def gather_random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of torch, ``device``, numpy and Python on every rank, by rank. Collective on the default group."""
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = numpy_state
    mine = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    return gather_objects(mine)


def set_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """Take this rank's state from the states of all ranks; on another world size warn and leave the states alone."""
    if len(states) != dist.get_world_size():
        warnings.warn(
            f"the checkpoint holds the random states of {len(states)} ranks, this run has {dist.get_world_size()}: dropout and "
            "other random draws go on from this run's seed",
            stacklevel=2,
        )
        return
    mine = states[dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    if device.type == "cuda" and mine["cuda"] is not None:
        torch.cuda.set_rng_state(mine["cuda"], device)
    keys, *rest = mine["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = mine["python"]
    random.setstate((version, tuple(internal), gauss))
