"""What TorchRec would move for bags, which its owners of rows pool before they send."""

from __future__ import annotations

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch
from lightning_freescale.embeddings.overlap.row_layout import RowLayout


class BagTraffic:
    """Counts it for tables of one width. It follows from the number of bags, not from what is in them.

    A table that is split by rows is pooled by every rank, and each sends all other ranks a row for each of their bags, also
    for those that it has no row of (a reduce-scatter). A table that one rank holds is pooled there.

    Args:
        layout: of the tables.
        rank: this rank.
        dim: width of a row.
    """

    def __init__(self, layout: RowLayout, rank: int, dim: int) -> None:
        self._layout, self._dim = layout, dim
        last = torch.tensor([[layout.rows_of(each)] for each in range(layout.ranks)])
        holds = torch.diff(layout.first_row, append=last) > 0
        sends = holds | (holds.sum(dim=0) > 1)
        self._places = np.array(layout.places)
        self._others = np.arange(layout.ranks) != rank
        self._senders = [
            (feature, (sends[:, table].numpy() & self._others).astype(np.int64)) for feature, table in layout.features
        ]

    def pooled_rows(self, features: KeyedJaggedTensor) -> np.ndarray:
        """Return how many pooled rows TorchRec would send to this rank for one lookup, by the rank that sends them."""
        bags = dict(zip(features.keys(), features.stride_per_key()))
        none = np.zeros(self._layout.ranks, np.int64)
        return sum((bags.get(feature, 0) * senders for feature, senders in self._senders), none)

    def torchrec_bytes(self, batch: PipelinedBatch) -> int:
        """Return what TorchRec would move for this rank's lookups of a batch."""
        ids = np.array(batch.request.ids)[self._places]  # by rank
        # an id of 64 bits; a bag's length, its pooled row and back the gradient
        return int((8 * ids + (4 + 2 * 4 * self._dim) * batch.pooled_rows)[self._others].sum())
