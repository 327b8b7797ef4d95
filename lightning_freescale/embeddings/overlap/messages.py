"""How the messages of a step that carry several things are laid out, and taken apart.

Each is one flat tensor of floats with a part per rank. A part begins with some bytes and goes on with rows, both at multiples
of a row's width, so that rows are gathered straight into their place. A receiver bounds what comes: a slot may be longer than
the part that lands in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_FEW_RANKS = 32
"""Up to here a slice per rank costs less than an index of all numbers."""


def ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return ``counts[k]`` numbers from ``starts[k]`` on, one range after the other."""
    before = [*accumulate(counts, initial=0)]
    shifts = torch.tensor([start - done for start, done in zip(starts, before)], device=device)
    shifts = torch.repeat_interleave(shifts, torch.tensor(counts, device=device), output_size=before[-1])
    return shifts + torch.arange(before[-1], device=device)


def take(source: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return ``counts[k]`` elements of ``source`` from ``starts[k]`` on, one range after the other."""
    if len(counts) > _FEW_RANKS:
        return source[ranges(starts, counts, source.device)]
    return torch.cat([source[start : start + count] for start, count in zip(starts, counts)])


def put(target: Tensor, starts: Sequence[int], counts: list[int], values: Tensor) -> None:
    """Write ``values`` to where :func:`take` would read them."""
    if len(counts) > _FEW_RANKS:
        target[ranges(starts, counts, target.device)] = values.to(target.dtype)  # an index does not convert, as a slice does
        return
    for start, count, part in zip(starts, counts, values.split_with_sizes(counts)):
        target[start : start + count] = part


class PartLayout:
    """Where the parts of a message lie.

    Args:
        dim: width of a row, in floats.
        preambles: bytes before the rows, by rank.
        rows: rows, by rank.

    Attributes:
        starts: where each part begins, counted in rows, and the end of the last.
        first_rows: where its rows begin, counted in rows.
        sizes: floats per part.
    """

    def __init__(self, dim: int, preambles: Sequence[int], rows: Sequence[int]) -> None:
        heads = [-(-size // (4 * dim)) for size in preambles]
        self.starts = [*accumulate((head + count for head, count in zip(heads, rows)), initial=0)]
        self.first_rows = [start + head for start, head in zip(self.starts, heads)]
        self.sizes = [dim * (head + count) for head, count in zip(heads, rows)]
        self._dim = dim

    @property
    def length(self) -> int:
        """Length of the message, counted in rows."""
        return self.starts[-1]

    def words(self, offset: int = 0) -> list[int]:
        """Return where each part begins, counted in words of 4 bytes, ``offset`` words further on."""
        return [start * self._dim + offset for start in self.starts[:-1]]

    def octets(self) -> list[int]:
        """Return where each part begins, counted in bytes."""
        return [4 * start * self._dim for start in self.starts[:-1]]
