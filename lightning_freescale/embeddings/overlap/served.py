"""What this rank is asked for as an owner: every rank's rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class IncomingRows:
    """Rows in the order in which they came: by asking rank, then by slot.

    Attributes:
        rows: row numbers here, shape ``[rows]``.
        counts: rows per asking rank and slot, shape ``[ranks, slots]``, on the host.
    """

    rows: Tensor
    counts: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor], counts: Tensor) -> IncomingRows:
        """From what each rank asked for."""
        return cls(torch.cat(list(parts)).long(), counts)

    @property
    def sizes(self) -> list[int]:
        """Rows per asking rank."""
        return self.counts.sum(dim=1).tolist()

    def parts(self) -> list[Tensor]:
        """The rows of each asking rank."""
        return list(self.rows.split(self.sizes))

    def by_slot(self, chosen: Tensor) -> Tensor | slice:
        """How to reorder the ``chosen`` of ``rows`` (bool) to by slot, then by asking rank: TorchRec adds up in that order."""
        ranks, slots = self.counts.shape
        if slots == 1:
            return slice(None)
        slot = torch.arange(slots, dtype=torch.int16).repeat(ranks).repeat_interleave(self.counts.flatten())
        return torch.argsort(slot.to(chosen.device)[chosen], stable=True)


class RowMembership:
    """Which of this rank's rows are in a set.

    Args:
        rows: how many this rank owns.
        device: of the rows.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._marks = torch.zeros(rows, dtype=torch.bool, device=device)

    def among(self, rows: Tensor, others: Sequence[Tensor]) -> Tensor:
        """For every row whether it is in ``others``; bool of shape ``[rows]``."""
        for other in others:
            self._marks[other] = True
        found = self._marks[rows]
        for other in others:
            self._marks[other] = False
        return found


@dataclass(frozen=True)
class RowMask:
    """Some of the rows that travel between this rank and each of the others.

    Attributes:
        mask: which, bool of shape ``[rows]``.
        sizes: how many per rank.
    """

    mask: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, mask: Tensor, sizes: Sequence[int]) -> RowMask:
        """Count them; there are ``sizes`` rows per rank in all."""
        totals = np.concatenate([[0], np.cumsum(mask.cpu().numpy())])
        return cls(mask, np.diff(totals[np.cumsum([0, *sizes])]).tolist())

    @classmethod
    def none(cls, sizes: Sequence[int], device: torch.device) -> RowMask:
        """None of them."""
        return cls(torch.zeros(sum(sizes), dtype=torch.bool, device=device), [0] * len(sizes))

    def others(self, sizes: Sequence[int]) -> RowMask:
        """All that are not chosen."""
        return RowMask(~self.mask, [size - chosen for size, chosen in zip(sizes, self.sizes)])
