"""An exchange over a group whose messages cannot be shorter than their slots: sizes travel first. For CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_with_sizes(
    group: dist.ProcessGroup, received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int]
) -> None:
    """Do as :meth:`ProcessGroupFreeScale.exchange`, by two all-to-alls. Collective.

    The host waits for the device to learn the sizes (not tested on GPU).

    Raises:
        DistBackendError: more comes than a slot holds.
    """
    sizes = torch.tensor(gives, device=send.device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    came = coming.tolist()
    for rank, (size, room) in enumerate(zip(came, gets)):
        if size > room:
            raise dist.DistBackendError(
                f"rank {rank} sends {size} elements, and its slot here holds {room}: give it a longer one"
            )
    parts = torch.empty(sum(came), dtype=received.dtype, device=received.device)
    dist.all_to_all_single(parts, send, came, list(gives), group=group)
    for start, part in zip(accumulate(gets, initial=0), parts.split(came)):
        received[start : start + part.shape[0]] = part
