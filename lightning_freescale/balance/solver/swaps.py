"""The best exchange between two ranks, for many pairs at once: with numpy, and as the loop that numba compiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.problem import Ints

_NEVER = np.iinfo(np.int64).max


def best_exchange(
    slow: Ints, quick: Ints, slow_load: Ints, quick_load: Ints, slow_pace: Ints, quick_pace: Ints, blocked: NDArray[np.bool_]
) -> Ints:
    """Which unit to give and which to take so that the later of the two ranks is done soonest.

    Args:
        slow: costs that the slow rank of each pair may give, shape ``[pairs, candidates]``; 0 is an empty slot.
        quick: costs that its partner may give back, the same shape.
        slow_load: summed cost of the slow ranks, shape ``[pairs]``.
        quick_load: of their partners.
        slow_pace: time per cost of the slow ranks, shape ``[pairs]``.
        quick_pace: of their partners.
        blocked: exchanges that are not allowed, shape ``[pairs, candidates, candidates]``; empty if all are.

    Returns:
        ``give * candidates + take`` of every pair, the first of equals; -1 where no exchange helps. Shape ``[pairs]``.
    """
    pairs, candidates = slow.shape
    more = slow[:, :, None] - quick[:, None, :]
    later = quick_load[:, None, None] + more
    later *= quick_pace[:, None, None]
    np.subtract(slow_load[:, None, None], more, out=more)
    more *= slow_pace[:, None, None]
    np.maximum(later, more, out=later)
    if blocked.size:
        later[blocked] = _NEVER
    flat = later.reshape(pairs, candidates * candidates)
    best = flat.argmin(axis=1)
    return np.where(flat[np.arange(pairs), best] < slow_load * slow_pace, best, -1)


def best_exchange_loop(
    slow: Ints, quick: Ints, slow_load: Ints, quick_load: Ints, slow_pace: Ints, quick_pace: Ints, blocked: NDArray[np.bool_]
) -> Ints:
    """The same, to the index, written out."""
    pairs, candidates = slow.shape
    result = np.full(pairs, -1)
    for p in range(pairs):
        least = slow_load[p] * slow_pace[p]
        for i in range(candidates):
            for j in range(candidates):
                more = slow[p, i] - quick[p, j]
                later = max((slow_load[p] - more) * slow_pace[p], (quick_load[p] + more) * quick_pace[p])
                if later < least and not (blocked.size and blocked[p, i, j]):
                    least, result[p] = later, i * candidates + j
    return result
