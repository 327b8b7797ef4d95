"""The all-to-all that the overlap benchmark gives to TorchRec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor


class Wire:
    """Stands in for ``dist.all_to_all_single``: counts the bytes sent to others, and posts its receives first.

    Gloo's own sends to a peer before it posts the receive; with a rank that comes late the two directions of a link then
    follow each other. ``stock`` leaves the transfers to it.
    """

    def __init__(self, stock: bool = False) -> None:
        self.stock, self.sent, self._calls = dist.all_to_all_single if stock else None, 0, 0

    def patched(self) -> AbstractContextManager[Any]:
        """While entered, all that calls ``dist.all_to_all_single``, TorchRec too, comes here."""
        return patch.object(dist, "all_to_all_single", self)

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Take the arguments of ``dist.all_to_all_single``, and return what it does."""
        group = group or dist.group.WORLD
        assert group is not None
        rank, size = group.rank(), group.size()
        incoming = output.split(output_split_sizes or len(output) // size)
        outgoing = input.split(input_split_sizes or len(input) // size)
        peers = [peer for peer in range(size) if peer != rank]
        self.sent += sum(outgoing[peer].nbytes for peer in peers)
        if self.stock:
            return self.stock(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)
        self._calls += 1
        works = [dist.irecv(incoming[p], group=group, group_src=p, tag=self._calls) for p in peers if len(incoming[p])]
        works += [dist.isend(outgoing[p], group=group, group_dst=p, tag=self._calls) for p in peers if len(outgoing[p])]
        incoming[rank].copy_(outgoing[rank])
        pending = _Pending(works, outgoing)
        return pending if async_op else pending.wait()


class _Pending(dist.Work):
    """Transfers under way; it keeps the sends and their memory alive, without which they would be cancelled."""

    def __init__(self, works: list[Any], outgoing: Sequence[Tensor]) -> None:
        super().__init__()
        self.works, self.outgoing = works, outgoing

    def wait(self, timeout: object = None) -> bool:
        """Block until all has come and gone."""
        for work in self.works:
            work.wait()
        self.works = []
        return True
