"""In which order the rows of a table lie, before that order is cut into one block per owner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isqrt

import torch
from torch import Tensor

_GOLDEN = (5**0.5 - 1) / 2
_FIBONACCI_HASH = 2654435769
"""The golden ratio in 32 bits, Knuth's multiplier of hashes (The Art of Computer Programming, vol. 3, 6.4)."""
_MOST_ROWS = isqrt(2**63)
"""Up to here the product of two row numbers fits an int64."""
_ROWS_AT_ONCE = 2**16
"""That are copied between a table and its shards: a copy by index makes another copy on the way."""


@dataclass(frozen=True)
class RowOrder:
    """Row ``id`` lies at position ``(id * multiplier + offset) mod rows``; by default where its id says.

    Attributes:
        rows: rows of the table.
        multiplier: has no divisor in common with ``rows``, so that no two rows meet.
        offset: position of row 0.
    """

    rows: int
    multiplier: int = 1
    offset: int = 0

    @classmethod
    def hashed(cls, rows: int) -> RowOrder:
        """Return an order that lays neighbours far apart: any run of ids is spread evenly over the owners.

        The positions of successive ids are a Kronecker sequence: a multiplier near ``rows`` times the golden ratio leaves the
        most even gaps that there are (Steinhaus' three distances), as long as an owner has more than the root of all rows.
        It depends on ``rows`` alone, so that all ranks agree, whatever their number.

        The rows of a table with more than 3,037,000,499 rows stay in the order of their ids.
        """
        if rows > _MOST_ROWS:  # the products of row numbers would not fit into 64 bits
            return cls(rows)
        near = round(rows * _GOLDEN)
        multiplier = next(n for step in range(rows + 1) for n in (near + step, near - step) if n > 0 and gcd(n, rows) == 1)
        # tables of different sizes do not put their first row, the most popular one, on the same owner
        return cls(rows, multiplier, rows * (rows * _FIBONACCI_HASH % 2**32) >> 32)

    @property
    def by_id(self) -> bool:
        """Whether rows lie in the order of their ids."""
        return self.multiplier == 1 and self.offset == 0

    def positions(self, ids: Tensor) -> Tensor:
        """Return where rows lie; ids of any integer dtype, from 0 to ``rows - 1``, the result int64 of their shape."""
        ids = ids.long()
        if self.by_id:
            return ids
        return torch.add(self._offset, ids, alpha=self.multiplier).remainder_(self.rows)

    def ids(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return which rows lie at positions ``start`` to ``stop - 1``: int64 of shape ``[stop - start]``."""
        positions = torch.arange(start, stop, device=device)
        return positions if self.by_id else positions.sub_(self.offset).mul_(self._inverse).remainder_(self.rows)

    def read(self, whole: Tensor, start: int, into: Tensor) -> None:
        """Copy the rows at positions ``start`` and on from a table in the order of ids, as many as ``into`` has."""
        for part, ids in self._parts(into, start, whole.device):
            part.copy_(whole[ids].reshape(part.shape))

    def write(self, part: Tensor, start: int, whole: Tensor) -> None:
        """Copy rows that lie at positions ``start`` and on to where a table in the order of ids has them."""
        for values, ids in self._parts(part, start, whole.device):
            whole[ids] = values.to(whole.device).reshape(len(values), *whole.shape[1:])

    def _parts(self, part: Tensor, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """Yield some rows of ``part`` after the other, each with its index in a table in the order of ids."""
        for first in range(0, len(part), _ROWS_AT_ONCE):
            rows = part[first : first + _ROWS_AT_ONCE]
            here = slice(start + first, start + first + len(rows))
            yield rows, here if self.by_id else self.ids(here.start, here.stop, device)

    @cached_property
    def _offset(self) -> Tensor:
        return torch.tensor(self.offset, device="cpu")  # a number to the kernel, whatever the device of the ids

    @cached_property
    def _inverse(self) -> int:
        return pow(self.multiplier, -1, self.rows)
