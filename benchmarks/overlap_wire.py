"""All-to-all that the overlap benchmark gives to TorchRec."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor


class Wire:
    """Replaces ``dist.all_to_all_single``: counts the bytes sent to others, and sends them over a given backend.

    Gloo's own all-to-all sends to a peer before it posts the receive. If a rank is late, the two directions of a link then
    follow each other. The comparison therefore gives the backend ``"freescale"`` to TorchRec, too. Creating it is collective.
    """

    def __init__(self, backend: str = "freescale") -> None:
        self.sent, self._group, self._exchange = 0, dist.new_group(backend=backend), dist.all_to_all_single

    def patched(self) -> AbstractContextManager[Any]:
        """Redirect all calls of ``dist.all_to_all_single``, including TorchRec's, while entered."""
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
        """Accept the arguments of ``dist.all_to_all_single`` and return its result; ``group`` has the same ranks."""
        parts = input.split(input_split_sizes or len(input) // dist.get_world_size())
        self.sent += sum(part.nbytes for peer, part in enumerate(parts) if peer != dist.get_rank())
        return self._exchange(output, input, output_split_sizes, input_split_sizes, group=self._group, async_op=async_op)
