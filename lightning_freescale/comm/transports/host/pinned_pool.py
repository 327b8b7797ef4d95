"""Page-locked host memory for copy engines, kept for reuse because pinning is slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


def _pinned(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


class PinnedPool:
    """Buffers by size class (powers of two), of which it holds no more than ``bound`` bytes, in use or not.

    Used by one thread at a time.

    Args:
        bound: bytes.
        allocate: makes a buffer of so many bytes.

    Attributes:
        held: bytes in use and kept.
        in_use: bytes in use.
    """

    def __init__(self, bound: int, allocate: Callable[[int], Tensor] = _pinned) -> None:
        self.bound, self.held, self.in_use = bound, 0, 0
        self._allocate = allocate
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, length: int) -> Tensor | None:
        """A buffer of at least ``length`` bytes; None if others must be given back first."""
        size = 1 << max(0, length - 1).bit_length()
        if not self._free[size]:
            self._make_room(size)
            if self.held + size > self.bound:
                return None
            self._free[size].append(self._allocate(size))
            self.held += size
        self.in_use += size
        return self._free[size].pop()

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        self.in_use -= len(buffer)
        self._free[len(buffer)].append(buffer)

    def clear(self) -> None:
        """Let go of all that is not in use."""
        self._free.clear()
        self.held = self.in_use

    def _make_room(self, size: int) -> None:
        """Let go of buffers of other sizes, the largest first."""
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self.held + size > self.bound:
                self._free[other].pop()
                self.held -= other
