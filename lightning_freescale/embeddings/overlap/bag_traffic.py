"""What moves more bytes, the rows of bags, each once, or the pooled rows that TorchRec's owners make of them?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.transport import Transport

DECIDING_STEPS = 8
"""Steps with a gradient that are counted."""


@dataclass(frozen=True)
class BagBytes:
    """What crosses between ranks in those steps, ids included, of all ranks.

    Attributes:
        rows: by the overlap engine: every row that a rank's bags need, once, and back its gradient.
        pooled: by TorchRec: every bag pooled by the owners of its rows, and back its gradient.
        irregular: how often a rank made no lookup, or several, in one of the steps, which TorchRec would wait for, or update
            for each; and one more if in any collection the ranks' lookups differ, who might then wait for each other there
            and here.
    """

    rows: int
    pooled: int
    irregular: int

    def __add__(self, other: BagBytes) -> BagBytes:
        """Return the sums of both."""
        return BagBytes(self.rows + other.rows, self.pooled + other.pooled, self.irregular + other.irregular)


class BagTraffic:
    """Counts both for tables of one width. TorchRec's share follows from the number of bags, not from what is in them.

    A table that is split by rows is pooled by every rank, and each sends all other ranks a row for each of their bags, also
    for those that it has no row of (a reduce-scatter). A table that one rank holds is pooled there.

    Args:
        layout: of the tables.
        transport: of their messages.

    Attributes:
        total: of the deciding steps, the same on all ranks; None before.
        decided_in: number of the last one's batch.
    """

    def __init__(self, layout: RowLayout, transport: Transport) -> None:
        self._transport, self._layout = transport, layout
        self.total: BagBytes | None = None
        self.decided_in = 0
        self._mine, self._steps = BagBytes(0, 0, 0), 0
        last = torch.tensor([[layout.rows_of(rank)] for rank in range(layout.ranks)])
        holds = torch.diff(layout.first_row, append=last) > 0
        split = holds.sum(dim=0) > 1
        others = torch.where(split, layout.ranks - 1, (~holds[transport.rank]).long()).tolist()
        self._senders = [(feature, int(others[table])) for feature, table in layout.features]

    def pooled_rows(self, features: KeyedJaggedTensor) -> int:
        """Return how many pooled rows TorchRec would send to this rank for one lookup."""
        bags = dict(zip(features.keys(), features.stride_per_key()))
        return sum(bags.get(feature, 0) * senders for feature, senders in self._senders)

    def torchrec_bytes(self, batch: PipelinedBatch) -> int:
        """Return what TorchRec would move for this rank's lookups of a batch."""
        request, place = batch.request, self._layout.places[self._transport.rank]
        # an id of 64 bits; a bag's length, its pooled row and back the gradient
        return 8 * (sum(request.ids) - request.ids[place]) + (4 + 2 * 4 * self._transport.dim) * batch.pooled_rows

    def count(self, batch: PipelinedBatch) -> None:
        """Count a step that a rank has a gradient of; after the last deciding one, add up what all ranks have. Collective."""
        if self.total is not None:
            return
        request, place = batch.request, self._layout.places[self._transport.rank]
        rows = (4 + 2 * 4 * self._transport.dim) * (sum(request.owned) - request.owned[place])
        self._mine += BagBytes(rows, self.torchrec_bytes(batch), int(batch.lookups != 1))
        self._steps += 1
        if self._steps == DECIDING_STEPS:
            mine = np.array([batch.pattern, *astuple(self._mine)], np.int64).view(np.int32)
            told = self._transport.exchange_numbers(np.tile(mine, (self._transport.ranks, 1)))
            patterns, *counts = np.array(told, np.int32).view(np.int64).T
            self.decided_in = batch.number  # before the total: the training thread reads them in the other order
            self.total = BagBytes(*(int(count.sum()) for count in counts)) + BagBytes(0, 0, len(set(patterns)) - 1)

    def counted(self) -> dict[str, Any]:
        """Return what :meth:`restore` takes, while nothing is under way."""
        total = None if self.total is None else astuple(self.total)
        return {"steps": self._steps, "mine": astuple(self._mine), "total": total}

    def restore(self, counted: Mapping[str, Any], decided_in: int) -> None:
        """Go on counting, before the first step; ``decided_in`` is the attribute of that name."""
        total = counted["total"]
        self._steps, self._mine, self.decided_in = counted["steps"], BagBytes(*counted["mine"]), decided_in
        self.total = None if total is None else BagBytes(*total)
