"""How the two messages of a step that carry several things are laid out, and taken apart.

Each is one flat tensor of floats, a part per rank, and every part begins at a multiple of a row's width, so that rows are
gathered straight into their place. A receiver bounds what comes: a slot may be longer than the part that lands in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers ``starts[k], starts[k] + 1, ...``, ``counts[k]`` of them, one range after the other."""
    before = [*accumulate(counts, initial=0)]
    shifts = torch.tensor([start - done for start, done in zip(starts, before)], device=device)
    shifts = torch.repeat_interleave(shifts, torch.tensor(counts, device=device), output_size=before[-1])
    return shifts + torch.arange(before[-1], device=device)


class PartLayout:
    """Where the parts of a message lie: in each a preamble of some bytes, then rows.

    Args:
        dim: width of a row, in floats.
        preambles: bytes before the rows, by rank.
        rows: rows, by rank.

    Attributes:
        sizes: floats per rank.
        total: rows in all, with the room for the preambles.
    """

    def __init__(self, dim: int, preambles: Sequence[int], rows: Sequence[int]) -> None:
        self._dim = dim
        heads = [-(-size // (4 * dim)) for size in preambles]
        lengths = [head + count for head, count in zip(heads, rows)]
        self._starts = [*accumulate(lengths, initial=0)]
        self._first_rows = [start + head for start, head in zip(self._starts, heads)]
        self.sizes = [length * dim for length in lengths]
        self.total = self._starts[-1]

    def places_of_rows(self, counts: Sequence[int], device: torch.device) -> Tensor:
        """Return where, counted in rows, the first ``counts`` rows of each part are."""
        return ranges(self._first_rows, counts, device)

    def first_places(self) -> list[int]:
        """Return where the rows of each part begin, counted in rows."""
        return self._first_rows

    def starts(self, size: int) -> list[int]:
        """Return where each part begins, counted in elements of ``size`` bytes."""
        return [start * self._dim * 4 // size for start in self._starts[:-1]]
