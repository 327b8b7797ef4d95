"""The order of a table's rows, which is cut into one block per owner."""

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
"""The largest number of rows for which the product of two row numbers fits into an int64."""
_ROWS_AT_ONCE = 2**16
"""The number of rows per copy between a table and its shards, because a copy by index needs temporary memory."""


@dataclass(frozen=True)
class RowOrder:
    """An order of rows: row ``id`` has position ``(id * multiplier + offset) mod rows``, by default the position ``id``."""

    rows: int  # number of rows of the table
    multiplier: int = 1  # has no common divisor with rows, so that positions are unique
    offset: int = 0  # position of row 0

    @classmethod
    def hashed(cls, rows: int) -> RowOrder:
        """Return an order in which neighbouring ids are far apart, so that any range of ids is spread evenly over the owners.

        The positions of successive ids are a Kronecker sequence. A multiplier near ``rows`` times the golden ratio has the
        most even gaps (Steinhaus' three-distance theorem) if each owner has more than ``sqrt(rows)`` rows. The order depends
        only on ``rows``, so all ranks agree for any number of ranks.

        Tables with more than 3,037,000,499 rows keep the order of their ids.
        """
        if rows > _MOST_ROWS:
            return cls(rows)
        near = round(rows * _GOLDEN)
        multiplier = next(n for step in range(rows + 1) for n in (near + step, near - step) if n > 0 and gcd(n, rows) == 1)
        # the offset puts the first rows, which are often the most popular, of different tables on different owners
        return cls(rows, multiplier, rows * (rows * _FIBONACCI_HASH % 2**32) >> 32)

    @property
    def by_id(self) -> bool:
        """Whether rows are in the order of their ids."""
        return self.multiplier == 1 and self.offset == 0

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions of ids from 0 to ``rows - 1``, any integer dtype: int64 of the same shape."""
        ids = ids.long()
        if self.by_id:
            return ids
        return torch.add(self._offset, ids, alpha=self.multiplier).remainder_(self.rows)

    def ids(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return the ids at positions ``start`` to ``stop - 1``: int64 of shape ``[stop - start]``."""
        return self.ids_at(torch.arange(start, stop, device=device))

    def ids_at(self, positions: Tensor) -> Tensor:
        """Return the ids at positions, int64 of the same shape."""
        return positions if self.by_id else (positions - self.offset).mul_(self._inverse).remainder_(self.rows)

    def read(self, whole: Tensor, start: int, into: Tensor) -> None:
        """Copy ``len(into)`` rows, beginning with position ``start``, from a table in the order of ids."""
        for part, ids in self._parts(into, start, whole.device):
            # index_select copies whole rows, which takes a fifth of the time of whole[ids]
            rows = whole[ids] if isinstance(ids, slice) else whole.index_select(0, ids)
            part.copy_(rows.reshape(part.shape))

    def write(self, part: Tensor, start: int, whole: Tensor) -> None:
        """Copy rows, whose positions begin with ``start``, to their places in a table in the order of ids."""
        for values, ids in self._parts(part, start, whole.device):
            whole[ids] = values.to(whole.device).reshape(len(values), *whole.shape[1:])

    def _parts(self, part: Tensor, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """Yield chunks of ``part`` with their indices in a table in the order of ids."""
        for first in range(0, len(part), _ROWS_AT_ONCE):
            rows = part[first : first + _ROWS_AT_ONCE]
            here = slice(start + first, start + first + len(rows))
            yield rows, here if self.by_id else self.ids(here.start, here.stop, device)

    @cached_property
    def _offset(self) -> Tensor:
        return torch.tensor(self.offset, device="cpu")  # a CPU scalar works with ids on any device

    @cached_property
    def _inverse(self) -> int:
        return pow(self.multiplier, -1, self.rows)
