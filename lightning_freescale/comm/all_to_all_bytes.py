"""An all-to-all of bytes whose lengths only the sender knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_bytes(outgoing: Sequence[bytes | bytearray | memoryview | Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``outgoing[r]`` to rank ``r`` of ``group``. Collective; for groups that move CPU tensors.

    Args:
        outgoing: one part per rank: bytes, or CPU tensors of uint8; a part may be empty.
        group: the ranks; nothing else may use it at the same time. One of backend ``"freescale"`` moves both directions of
            a link at the same time, also when a rank is late; gloo's own all-to-all does not.

    Returns:
        What each rank sent here, uint8 of shape ``[bytes]``. The own part is what was given.

    Raises:
        ValueError: there is not one part per rank, or a part is no uint8 tensor.
        RuntimeError: a rank died, or did not come within the group's timeout.
    """
    size = group.size()
    if len(outgoing) != size:
        raise ValueError(f"exchange_bytes(outgoing=...) has {len(outgoing)} parts for {size} ranks: pass one per rank")
    parts = [_as_tensor(part) for part in outgoing]
    rank, own = group.rank(), parts[group.rank()]
    parts[rank] = own[:0]  # it need not be copied
    given = [len(part) for part in parts]
    by_rank = [torch.empty(size, dtype=torch.int64) for _ in parts]
    dist.all_gather(by_rank, torch.tensor(given), group=group)
    lengths = [int(given_there[rank]) for given_there in by_rank]
    received = torch.empty(sum(lengths), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(parts), lengths, given, group=group)
    incoming = list(received.split(lengths))
    incoming[rank] = own
    return incoming


def _as_tensor(part: bytes | bytearray | memoryview | Tensor) -> Tensor:
    if isinstance(part, Tensor):
        if part.dtype != torch.uint8 or part.ndim != 1 or part.is_cuda:
            raise ValueError(
                f"exchange_bytes: a part is a {part.dtype} tensor of shape {tuple(part.shape)} on {part.device}: pass uint8 of "
                "shape [bytes] on the CPU"
            )
        return part.contiguous()
    # frombuffer takes neither empty nor read-only memory
    return torch.frombuffer(bytearray(part), dtype=torch.uint8) if len(part) else torch.empty(0, dtype=torch.uint8)
