"""What moves more bytes, the rows of bags, each once, or the pooled rows that TorchRec's owners make of them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """What crosses between ranks in those steps, ids included, of all ranks; with proxies between nodes alone.

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

    Where requests go through proxies, only what crosses between nodes is counted, on both sides: to save that, more travels
    within the nodes.

    Args:
        layout: of the tables.
        transport: of messages between all ranks.
        far: which ranks are on other nodes, with proxies; empty without.

    Attributes:
        total: of the deciding steps, the same on all ranks; None before.
        decided_in: number of the last one's batch.
    """

    def __init__(self, layout: RowLayout, transport: Transport, far: Sequence[bool]) -> None:
        self._transport, self._layout = transport, layout
        self.total: BagBytes | None = None
        self.decided_in = 0
        self._mine, self._steps = BagBytes(0, 0, 0), 0
        last = torch.tensor([[layout.rows_of(rank)] for rank in range(layout.ranks)])
        holds = torch.diff(layout.first_row, append=last) > 0
        sends = holds | (holds.sum(dim=0) > 1)
        self._places = np.array(layout.places)
        self._others = np.arange(layout.ranks) != transport.rank
        self._counted = np.array(far, bool) if len(far) else self._others
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
        return self._bytes_from(self._others, batch)

    def _bytes_from(self, ranks: np.ndarray, batch: PipelinedBatch) -> int:
        ids = np.array(batch.request.ids)[self._places]  # by rank
        # an id of 64 bits; a bag's length, its pooled row and back the gradient
        per_bag = 4 + 2 * 4 * self._transport.dim
        return int((8 * ids + per_bag * batch.pooled_rows)[ranks].sum())

    def count(self, batch: PipelinedBatch, rows: int) -> None:
        """Count a step that a rank has a gradient of; after the last deciding one, add up what all ranks have. Collective.

        Args:
            batch: of the step.
            rows: that this rank has fetched for it, see :meth:`Route.crossing_rows`.
        """
        if self.total is not None:
            return
        fetched = (4 + 2 * 4 * self._transport.dim) * rows
        self._mine += BagBytes(fetched, self._bytes_from(self._counted, batch), int(batch.lookups != 1))
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
