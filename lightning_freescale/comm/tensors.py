"""Tensors of known sizes from every rank to every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def exchange_tensors(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup) -> int:
    """Send ``outgoing[r]`` to rank ``r`` of ``group`` and receive what it sent into ``incoming[r]``. Collective.

    On CPU all receives are posted before the first send: gloo's own all-to-all sends to a peer before it posts the receive, so
    that with a rank that comes late the two directions of a link follow each other instead of running at the same time. On
    CUDA it is NCCL's all-to-all on the current stream (not tested on GPU).

    Args:
        outgoing: one contiguous tensor per rank; a part may be empty. The own one is copied.
        incoming: as large as what each rank sends here; filled.
        group: the ranks; nothing else may use it at the same time.

    Returns:
        Bytes sent to other ranks.

    Raises:
        RuntimeError: a rank died, or did not come within the group's timeout.
    """
    rank = group.rank()
    if outgoing[rank].is_cuda:
        dist.all_to_all(list(incoming), list(outgoing), group=group)
    else:
        peers = [peer for peer in range(group.size()) if peer != rank]
        works = [dist.irecv(incoming[peer], group=group, group_src=peer) for peer in peers if incoming[peer].numel()]
        works += [dist.isend(outgoing[peer], group=group, group_dst=peer) for peer in peers if outgoing[peer].numel()]
        if incoming[rank] is not outgoing[rank]:
            incoming[rank].copy_(outgoing[rank])
        for work in works:  # the list keeps the sends alive: a Work that is dropped cancels its transfer
            assert work is not None
            work.wait()
    return sum(part.nbytes for peer, part in enumerate(outgoing) if peer != rank)
