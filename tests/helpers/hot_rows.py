"""Options and patches for tests of the route of hot rows, which takes effect on real nodes with lists that change slowly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap.hot_rows import HotList

HOT: dict[str, Any] = {"dedup": True, "hot_rows": 0.5, "rerank_every_n_steps": 1, "ranks_per_node": 2}
"""Each row that any rank has requested is in the list of the next step, so the list changes in every step."""


@contextmanager
def every_row_hot() -> Iterator[None]:
    """Use a list of all rows from the first step on."""
    with (
        patch.object(HotList, "begun", True),
        patch.object(HotList, "contain", lambda self, keys: torch.ones_like(keys).bool()),
    ):
        yield


@contextmanager
def lists_that_differ() -> Iterator[None]:
    """Use other lists on every rank, which change from message to message."""
    calls = 0

    def contain(hot_list: HotList, keys: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (keys * 7 + 3 * dist.get_rank() + calls) % 3 < 2

    with patch.object(HotList, "begun", True), patch.object(HotList, "contain", contain):
        yield
