"""Gradients that owners hold between backward and the update, to be clipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_updates import GradientAccumulator
from lightning_freescale.embeddings.overlap.transport import Transport


class HeldGradients:
    """What clipping does to them, those of tables that it takes in; on the collection's worker only.

    Args:
        accumulator: has them, each row once.
        local: this rank's rows.
        transport: of the collection's messages.

    Attributes:
        square_sum: what :meth:`sum_squares` has found: float64, without dimensions.
    """

    square_sum: Tensor

    def __init__(self, accumulator: GradientAccumulator, local: LocalRows, transport: Transport) -> None:
        self._accumulator, self._local, self._transport = accumulator, local, transport

    def sum_squares(self, settings: Sequence[UpdateSettings]) -> None:
        """Add the squares of all elements up, over all ranks, in their order: the same number on each. Collective."""
        ranks = self._transport.ranks
        mine = torch.zeros(1, dtype=torch.float64, device=self._transport.device)
        for clipped, gradients in self._clipped(settings):
            mine += torch.linalg.vector_norm(gradients[clipped], dtype=torch.float64).square()
        told = self._transport.exchange_words(mine.view(torch.int32).repeat(ranks), [2] * ranks, [2] * ranks)
        self.square_sum = told.view(torch.float64).sum()

    def scale(self, factor: Tensor, settings: Sequence[UpdateSettings]) -> None:
        """Multiply all elements."""
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] *= factor

    def clamp(self, limit: float, settings: Sequence[UpdateSettings]) -> None:
        """Limit all elements to ``-limit ... limit``."""
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] = gradients[clipped].clamp(-limit, limit)

    def _clipped(self, settings: Sequence[UpdateSettings]) -> list[tuple[Tensor | slice, Tensor]]:
        kept = zip(self._accumulator.rows, self._accumulator.gradients)
        return [(self._local.clipped(rows, settings), gradients) for rows, gradients in kept]
