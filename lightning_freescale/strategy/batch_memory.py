"""Batches that a loader makes in the memory of the one before: looking ahead holds two at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_freescale._lightning.loops import rank_zero_warn
from lightning_freescale._walk import walk

_CHECKED_FETCHES = 3
"""A loader that fills the same memory again does so from the start."""


class BatchMemory:
    """Notices when a fetch writes over batches that wait, in tensors and arrays, and gives batches their own memory then."""

    def __init__(self) -> None:
        self._copies, self._unchecked = False, _CHECKED_FETCHES

    def copies_of(self, waiting: Iterable[Any]) -> list[Any]:
        """Return copies of the batches that wait, before another one is fetched; none once nobody need look any more."""
        copied = [_copy(batch) for batch in waiting] if self._unchecked and not self._copies else []
        self._unchecked -= bool(copied)
        return copied

    def restored(self, batch: Any, before: Any) -> Any:
        """Return a batch that waited during a fetch: as it was ``before``, if it is another now."""
        if before is None or _same_contents(before, batch):
            return batch
        if not self._copies:
            self._copies = True
            rank_zero_warn(
                "the training loader fills the same memory with every batch, and strategy 'freescale' fetches the next one "
                "before this one is trained on: every batch is copied from here on. Give each batch memory of its own, or use "
                "FreeScaleStrategy(overlap=False)"
            )
        return before

    def own(self, batch: Any) -> Any:
        """Return a batch that was just fetched, in memory that the loader does not fill again."""
        return copy.deepcopy(batch) if self._copies else batch


def _copy(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # it holds what cannot be copied, and is not looked at
        return None


def _same_contents(a: Any, b: Any) -> bool:
    tensors = ([node for node in walk(batch) if isinstance(node[1], (Tensor, np.ndarray))] for batch in (a, b))
    pairs = zip_longest(*tensors, fillvalue=((), None))
    return all(path == other_path and _equal(node, other) for (path, node), (other_path, other) in pairs)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype.hasobject or np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if a.layout != torch.strided or torch.equal(a, b):
        return True
    return a.is_floating_point() and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
