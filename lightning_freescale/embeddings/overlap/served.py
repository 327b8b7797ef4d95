"""What this rank is asked for as an owner: every rank's rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Served:
    """Rows in the order in which they came: by asking rank, then by slot.

    Attributes:
        rows: row numbers here, shape ``[rows]``.
        counts: rows per asking rank and slot, shape ``[ranks, slots]``, on the host.
    """

    rows: Tensor
    counts: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor], counts: Tensor) -> Served:
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
        slot = torch.arange(slots, dtype=torch.uint8).repeat(ranks).repeat_interleave(self.counts.flatten())
        return torch.argsort(slot.to(chosen.device)[chosen], stable=True)


class Touched:
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


def split_sizes(mask: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many are chosen in each of the consecutive parts of ``mask``."""
    if not len(mask):
        return [0] * len(sizes)
    ends = torch.cumsum(torch.tensor(sizes), 0)
    totals = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0).cpu()])[ends]
    return torch.diff(totals, prepend=totals.new_zeros(1)).tolist()
